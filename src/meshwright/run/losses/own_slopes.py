"""Code of the model's own in backward, and gradients of a trial as a few numbers, by which parts are compared with the whole.

torch's own operators give, in backward, what their forward says: where losses of parts give the loss of the whole, so do
their gradients. A hook on a tensor, the backward of a `torch.autograd.Function`, and gradients that code takes by itself may do
anything: scale by a norm over all samples, clip, centre. So gradients of parts are compared as well; where parameters are
too large for that, such code is told.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from meshwright.run.loss_graph import nodes_of

__all__: list[str] = []

Slopes = Mapping[str, Sequence[float]]
"""FQN -> [sums of a gradient's entries with fixed factors..., its 2-norm]."""

_NUM_SUMS = 2
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-3}
"""By how much gradients of parts may differ from those of the whole, by the loss's dtype [fraction of the norm]."""
_LOW_TOLERANCE = 0.1
_LEAST = 1e-4
"""Gradients that are smaller than the largest one by this are compared with that: roundings alone are left of some [fraction]."""
_KNOWN = ("torch.utils.checkpoint", "meshwright.")
_OF_HOOKS = "torch.nn.modules._functions"
"""Where torch has the function that stands for backward hooks of modules."""


def own_function_of(value: Tensor) -> str:
    """Return the name of a function in a graph whose backward is code of somebody's own; "" where there is none."""
    for node in nodes_of([value]):
        if isinstance(node, BackwardCFunction):
            kind: Any = getattr(type(node), "_forward_cls", type(node))
            if kind.__module__ == _OF_HOOKS:
                return "a backward hook of a module"
            if not kind.__module__.startswith(_KNOWN):
                return f"the autograd function {kind.__name__}"
    return ""


def slopes_of(value: Tensor, parameters: Iterable[tuple[str, nn.Parameter]], factor: float) -> dict[str, list[float]]:
    """Return the gradients of a loss by parameters, as a few numbers each; with what code in backward adds to `.grad` by itself.

    Args:
        value: The loss, a scalar with its graph.
        parameters: (FQN, parameter).
        factor: What the loss is multiplied by.
    """
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not value.requires_grad or not named:
        return {}
    root = torch.full_like(value, factor)
    are_empty = [parameter.grad is None for _, parameter in named]
    gradients = torch.autograd.grad(value, [parameter for _, parameter in named], root, allow_unused=True)
    found: dict[str, list[float]] = {}
    for (name, parameter), gradient, was_empty in zip(named, gradients, are_empty, strict=True):
        terms = [] if gradient is None else [_row_of(gradient)]
        if was_empty and parameter.grad is not None:
            terms.append(_row_of(parameter.grad))
            parameter.grad = None
        if terms:
            row = sum(terms[1:], terms[0])
            places = torch.arange(row.numel(), dtype=torch.float64, device=row.device)
            sums = [(row * torch.cos((0.7 + number) * places)).sum().item() for number in range(_NUM_SUMS)]
            found[name] = [*sums, row.norm().item()]
    return found


def _row_of(gradient: Tensor) -> Tensor:
    """Return a gradient's entries in a row, in float64."""
    held = gradient.detach()
    row = (held.to_dense() if held.layout != torch.strided else held).flatten()
    return (torch.view_as_real(row).flatten() if row.is_complex() else row).double()


def tolerance_of(dtype: torch.dtype) -> float:
    """Return by how much gradients of parts may differ from those of the whole, by the loss's dtype [fraction]."""
    return _TOLERANCES.get(dtype, _LOW_TOLERANCE)


def find_apart(
    whole: Slopes, parts: Sequence[Slopes], scale: float, tolerance: float, *, least: float = _LEAST
) -> tuple[str, float] | None:
    """Return (FQN, relative difference) of the gradient in which parts differ most from the whole; None where none does.

    Args:
        whole: Of the whole.
        parts: Of the parts, which add up.
        scale: What their sum is multiplied by.
        tolerance: By how much they may differ [fraction of a gradient's norm].
        least: Gradients that are smaller are compared with this [fraction of the largest gradient's norm].
    """
    names = dict.fromkeys(name for slopes in (whole, *parts) for name in slopes)
    zero = [0.0] * (_NUM_SUMS + 1)
    rows = {name: (whole.get(name, zero), [part.get(name, zero) for part in parts]) for name in names}
    norms = {name: max(one[-1], scale * sum(part[-1] for part in others)) for name, (one, others) in rows.items()}
    largest = max(norms.values(), default=0.0)
    worst: tuple[str, float] | None = None
    for name, (one, others) in rows.items():
        gaps = [abs(one[place] - scale * sum(part[place] for part in others)) for place in range(_NUM_SUMS)]
        size = max(norms[name], least * largest)
        gap = max(gaps) / size if size else 0.0
        if math.isfinite(gap) and gap > tolerance and (worst is None or gap > worst[1]):
            worst = name, gap
    return worst


@contextlib.contextmanager
def without_parameter_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Take hooks of parameters away inside the context, and put those of before back: a plan guards them by itself."""
    held = [(parameter, parameter._backward_hooks) for parameter in parameters]
    for parameter, hooks in held:
        if hooks:
            parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in held:
            if parameter._backward_hooks is not hooks:
                parameter._backward_hooks = hooks
