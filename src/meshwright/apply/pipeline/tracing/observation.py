"""Observation of a plain forward, in units that are opened until they are small enough for the stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import scripts_in_python
from meshwright.apply.first_look import FirstRun
from meshwright.apply.modules.copies import copy_module, sharing_attributes
from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.tracing.observer import ForwardObserver
from meshwright.apply.pipeline.tracing.scene import Scene
from meshwright.apply.pipeline.tracing.stage_map import with_one_opened
from meshwright.apply.pipeline.walking.told_results import Judged
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.hook_tables import hooks_put_back
from meshwright.apply.state.settling import Children, made_parameter_error
from meshwright.describe.layers import find_layers

__all__: list[str] = []


def observe(
    module: nn.Module, run: Callable[[nn.Module], Any], *, num_stages: int, closed: Collection[str], on_copy: bool
) -> Flow:
    """Run a model once, or a few times until its units are small enough for this number of stages, and restore it.

    Its buffers are restored, and counts and lists that its forward changes in attributes.

    Args:
        module: The plain model.
        run: Runs it and its loss on a small batch.
        num_stages: Stages that it will be cut into [count].
        closed: Modules that stay in one piece.
        on_copy: Whether to run a copy of the model, with parameters of its own.
    """
    observed = copy_module(module, Tensor.detach) if on_copy else module
    units, kept = [name for name, _ in find_layers(observed)], set(closed)
    judged = Judged()
    with _left_as_it_was(module), sharing_attributes(module, observed):
        flow, units = _observe_units(observed, run, units, judged)
        while (opened := with_one_opened(observed, flow, units, num_stages, kept)) is not None:
            finer, opened = _observe_units(observed, run, opened, judged)
            if flow.is_better_than(finer, num_stages):
                kept.update(set(units) - set(opened))  # it stays in one piece
            else:
                flow, units = finer, opened
        return flow


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes, children and hooks after the context.

    Ranks that do not observe run no forward, so the observing one must end with what they have. Each run has to begin with it,
    too: what a first forward alone changes, such as a flag, would go unseen in a second one.
    """
    buffers, attributes, children = BufferSnapshot(module), Scene((), {}, module.named_modules()), Children(module)
    try:
        with hooks_put_back(module.modules()):
            yield
    finally:
        children.restore()
        attributes.restore()
        buffers.restore()


def _observe_units(
    module: nn.Module, run: Callable[[nn.Module], Any], units: Sequence[str], judged: Judged
) -> tuple[Flow, list[str]]:
    """Return what a run showed, and the units; what one gives without any state of its own is left to the code between units."""
    flow, kept = _observe_once(module, run, units, judged), list(units)
    while (idle := flow.without_state(module)) and len(kept) > len(idle):
        kept = [name for name in kept if name not in idle]
        flow = _observe_once(module, run, kept, judged)
    return flow, kept


def _observe_once(module: nn.Module, run: Callable[[nn.Module], Any], units: Sequence[str], judged: Judged) -> Flow:
    observer, known = ForwardObserver(module, units), set(module.parameters())
    try:
        with _left_as_it_was(module):
            with scripts_in_python(), torch.enable_grad(), observer.attached(), observer.counter, observer:
                run(module)
            _refuse_new_parameters(module, known)
            # What layers compute grows with the samples, what their parameters cost does not.
            return observer.flow(run.pieces if isinstance(run, FirstRun) else 1, judged)
    finally:
        observer.forget()


def _refuse_new_parameters(module: nn.Module, known: Set[nn.Parameter]) -> None:
    name = next((name for name, parameter in module.named_parameters() if parameter not in known), None)
    if name is not None:
        raise made_parameter_error(name, "neither a stage nor the optimizer has it")
