"""Layers that code calls inside of a torch.autograd.Function, whose backward runs them again: no pipeline cuts there."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from meshwright.errors import ApplyError

__all__: list[str] = []

_APPLY = vars(torch.autograd.Function)["apply"].__func__.__code__


def refuse_inside_function(name: str, *, has_graph: bool) -> None:
    """Raise ApplyError where a Function's forward, which runs without a graph, calls a layer.

    Reversible layers do so. On a rank that does not have such a layer its backward would run it on numbers that are not there.

    Args:
        name: The layer's.
        has_graph: Whether the model's forward has one.
    """
    frame: FrameType | None = sys._getframe(1) if has_graph and not torch.is_grad_enabled() else None
    while frame is not None:
        if frame.f_code is _APPLY:
            function = frame.f_locals.get("cls")
            raise ApplyError(
                f"layer '{name}' is called inside of {getattr(function, '__name__', 'a torch.autograd.Function')}.apply(), "
                "whose backward runs it again by itself, as reversible layers do: a pipeline cannot be cut there",
                fix="use a plan of dp, zero and tp (pp=1)",
            )
        frame = frame.f_back
