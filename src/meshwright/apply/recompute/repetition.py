"""Comparison of a repeated layer's results with its first ones, on live data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from meshwright._torch_private import without_dispatch_modes, without_function_modes
from meshwright.apply.differences import relative_difference, tolerance_of
from meshwright.apply.finding import Finding
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []

_DETAILS = 3
"""Lines of torch's message that say which tensor differs, after the first one [count]."""


@contextlib.contextmanager
def unlike_saves_told(recompute: str) -> Iterator[None]:
    """Have torch's error about a repetition that saves other tensors name the way out.

    Args:
        recompute: The plan's; under "none" a checkpoint is the user's own, and so is its error.
    """
    try:
        yield
    except CheckpointError as error:
        if recompute == "none":
            raise
        details = " ".join(str(error).splitlines()[1 : 1 + _DETAILS])
        raise ApplyError(
            "the forward of a layer saves other tensors for backward when recompute runs it again than it did the first time "
            f"(code that torch.jit compiles, or nested tensors that the layer makes): {details}",
            fix="use recompute=none",
        ) from error


class Repetition:
    """The results of one call of a layer, kept until its repetition."""

    def __init__(self, name: str, findings: list[Finding]) -> None:
        self._name = name
        self._findings = findings
        self._kept: list[tuple[Tensor, float]] = []

    def keep(self, results: Any) -> None:
        """Keep copies: later code may write over the results."""
        # Unseen by modes: selective recompute counts operators, and a pipeline counts function calls, alike on all stages.
        with torch.no_grad(), without_dispatch_modes(), without_function_modes():
            self._kept = [(tensor.detach().clone(), tolerance_of(tensor)) for tensor in _plain(results)]

    def compare(self, results: Any) -> None:
        """Record the differences of the repetition's results."""
        with torch.no_grad(), without_dispatch_modes(), without_function_modes():
            for place, ((kept, tolerance), tensor) in enumerate(zip(self._kept, _plain(results), strict=False)):
                difference = relative_difference(tensor, kept)
                if not difference <= tolerance:
                    text = (
                        f"result {place} of '{self._name}' is another one when its forward runs again in backward: it draws from "
                        "a generator that is not torch's, keeps state outside of the module, or reads what has changed since"
                    )
                    self._findings.append(
                        Finding(part=self._name, difference=difference, tolerance=tolerance, text=text)
                    )
        self._kept = []


def _plain(results: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(results) if type(tensor) is Tensor]
