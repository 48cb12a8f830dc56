"""Inspection of a cut part: a second run as on one device, on the live data, compared with the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright._torch_dispatch import kept_by_nobody
from meshwright._torch_private import without_cached_weights, without_dispatch_modes
from meshwright.apply.differences import relative_difference, tolerance_of
from meshwright.apply.finding import Finding
from meshwright.apply.randomness.alike import alike_draws
from meshwright.apply.randomness.sites import drawing_again, running_draws
from meshwright.apply.state.attributes import OF_TORCH, insides_put_back
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.hook_tables import hooks_put_back
from meshwright.apply.state.kept_parameters import KeptParameters
from meshwright.apply.state.random_states import kept_random_states
from meshwright.apply.tensor.masks import Mask, NotedDropout, masks_of
from meshwright.apply.tensor.slices import make_whole
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_under_way = 0


def is_inspecting() -> bool:
    """Tell whether an inspection is running, and not the model's own forward; for code that counts calls."""
    return _under_way > 0


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    global _under_way
    _under_way += 1
    try:
        yield
    finally:
        _under_way -= 1


def compare_runs(
    module: nn.Module, name: str, given: Any, *, cut: Callable[[Any], Any], whole: Callable[[Any], Any]
) -> tuple[list[Finding], list[Mask]]:
    """Run a module with its arguments on shards and whole, and return the differences, and the masks of the shards.

    The module is left unchanged; each run has copies of the arguments' tensors, which it may write over.
    """
    results = []
    # What dropout is not (drop path, noise) draws the same numbers in both runs; those of the step, where they have a place.
    drawn = running_draws() or alike_draws()
    # Selective recompute would record these calls, and expect them again in backward; so would a user's dispatch mode.
    modes = NotedDropout(), NotedDropout()
    with torch.no_grad(), without_dispatch_modes(), kept_by_nobody(), _noted():
        for run, mode in zip((cut, whole), modes, strict=True):
            with left_as_it_was(module), drawing_again(drawn), insides_put_back(given), without_cached_weights(), mode:
                outputs = run(map_tensors(given, torch.Tensor.clone))
                results.append([make_whole(tensor) for tensor in tensors_in(map_tensors(outputs, torch.Tensor.detach))])
    findings = []
    for place, (mine, expected) in enumerate(zip(*results, strict=False)):
        tolerance = tolerance_of(expected)
        difference = relative_difference(mine, expected)
        if not difference <= tolerance:
            text = f"result {place} of '{name or 'the model itself'}' on shards differs from what it gives whole"
            findings.append(Finding(part=name, difference=difference, tolerance=tolerance, text=text))
    return findings, masks_of(name, *modes)


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Restore buffers, small parameters, attributes, hooks and random states after the context."""
    buffers, parameters = BufferSnapshot(module), KeptParameters(module)
    attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
    inside = [value for own, _ in attributes for name, value in own.items() if name not in OF_TORCH]
    devices = {parameter.device for parameter in module.parameters()}
    with insides_put_back(*inside), kept_random_states(devices, module=module), hooks_put_back(module.modules()):
        try:
            yield
        finally:
            for now, then in attributes:
                now.clear()
                now.update(then)
            buffers.restore()
            parameters.restore()
