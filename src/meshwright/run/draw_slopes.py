"""Gradients of parts beside those of the whole, with random numbers by place: where code of a model's own is in backward, or
losses differ by more than roundings do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch

from meshwright.run.losses.own_slopes import find_apart, tolerance_of
from meshwright.run.losses.proofs import apart_text
from meshwright.run.losses.trial_forward import TrialForward, TrialOutcome

__all__: list[str] = []


_IN_DOUBT = 1e-3
"""By how much gradients may differ in float32 where losses do, too [fraction of the norm]."""
_LEAST_IN_DOUBT = 1e-2
"""Gradients that are smaller than the largest one by this say nothing there: of some, roundings alone are left [fraction]."""


class DrawnForward(Protocol):
    """A trial forward that draws by place."""

    outcome: TrialOutcome


Run = Callable[..., Generator[list[TrialForward], list[TrialOutcome], Sequence[DrawnForward]]]


def try_drawn_slopes(
    run: Run,
    share: Any,
    placed: Sequence[tuple[Any, int]],
    weigh: Callable[[Any], float],
    *,
    is_coarse: bool,
    gap: float = 0.0,
) -> Generator[list[TrialForward], list[TrialOutcome], str]:
    """Return why gradients of parts do not give the whole's in training mode; "" where they do, or nothing could be tried.

    Args:
        run: Runs (batch, place of its first sample), with what each loss is multiplied by in ``factors``.
        share: The whole.
        placed: Its parts.
        weigh: Gives the weight of a part's mean.
        is_coarse: Whether parameters or products have fewer digits than the loss.
        gap: By how much the loss of parts differs from the whole's, where that is more than roundings make; else 0 [fraction].
    """
    first = (yield from run([(share, 0)], factors=[1.0]))[0].outcome
    if not (first.own_slopes or gap) or not first.slopes:
        return ""
    weights = [weigh(part) for part, _ in placed]
    total = sum(weights) if first.weight is None else first.weight
    if not total or min(weights) <= 0:
        return ""
    is_mean = first.weight is None
    whole = first if is_mean else (yield from run([(share, 0)], factors=[1.0 / total]))[0].outcome
    pieces = yield from run(placed, factors=[weight / total if is_mean else 1.0 for weight in weights])
    is_coarse = is_coarse or first.is_coarse
    scale, tolerance = 1.0 if is_mean else 1.0 / total, tolerance_of(torch.bfloat16 if is_coarse else first.dtype)
    slopes = [piece.outcome.slopes for piece in pieces]
    if first.own_slopes and (apart := find_apart(whole.slopes, slopes, scale, tolerance)) is not None:
        return apart_text(first.own_slopes, *apart)
    tolerance = tolerance if is_coarse else min(tolerance, _IN_DOUBT)
    apart = find_apart(whole.slopes, slopes, scale, tolerance, least=_LEAST_IN_DOUBT) if gap else None
    if apart is None:
        return ""
    return (
        f"in training mode, with the same random numbers, the loss over parts differs from the whole's by {gap:.2g} of it, and "
        f"the gradient of '{apart[0]}' by {apart[1]:.2g}"
    )
