"""Trials of what the loss of the first batch does not show: gradients of code's own, and what code keeps for the next batch.

Each compares the whole with parts, as the trials of the loss do, and returns why parts do not give one device's numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import torch

from meshwright.errors import some_of
from meshwright.run.losses.own_slopes import find_apart, tolerance_of
from meshwright.run.losses.trial_forward import RAISED, TrialForward, TrialOutcome
from meshwright.run.losses.trial_parts import ROUNDINGS, gap_of, second_sample, turn
from meshwright.trees import map_tensors

__all__: list[str] = []

_MOST_NOISE = 0.02
"""Such a difference that is larger is none of rounding: code that knows the place of a sample [fraction]."""
_COARSE = 0.5
"""By how much gradients may differ that are computed in less than float32, where no code of its own was seen [fraction]."""
_OF_LOSSES = 20.0
"""How much less exact gradients are than losses, which know of coarse parameters and products [ratio]."""

Trials = Generator[list[TrialForward], list[TrialOutcome], str]


@dataclasses.dataclass(frozen=True, slots=True)
class TriedLoss:
    """What the trials of the loss have shown.

    Args:
        like: The trial of the whole share, after which others are made.
        whole: Its outcome.
        parts: The share in parts.
        weights: How much the mean of each part weighs; the weights of a Loss.
        outcomes: Of the parts.
        tolerance: By how much equal losses may differ [fraction].
    """

    like: TrialForward
    whole: TrialOutcome
    parts: Sequence[Any]
    weights: Sequence[float]
    outcomes: Sequence[TrialOutcome]
    tolerance: float

    @property
    def is_sum(self) -> bool:
        """Whether losses are sums with weights."""
        return self.whole.weight is not None

    def gap(self, whole: TrialOutcome, outcomes: Sequence[TrialOutcome]) -> float:
        """Return the relative distance of the parts' loss from the whole's."""
        values, weights = [one.value for one in outcomes], list(self.weights)
        if self.is_sum:
            values = [one.value / one.weight if one.weight else 0.0 for one in outcomes]
            weights = [one.weight or 0.0 for one in outcomes]
        return gap_of(whole.value / (whole.weight or 1.0) if self.is_sum else whole.value, values, weights)


def try_all(
    tried: TriedLoss, changes: Sequence[str]
) -> Generator[list[TrialForward], list[TrialOutcome], tuple[str, str, str]]:
    """Return why gradients of parts do not give the whole's, why later batches do not, and what had no result; else "" each.

    Args:
        tried: What the loss has shown.
        changes: What code has changed, for people.
    """
    if tried.is_sum and tried.gap(tried.whole, tried.outcomes) > tried.tolerance:
        return "", "", ""  # a Loss says itself what it counts, and parts may decide for themselves
    first = (yield [dataclasses.replace(tried.like, slopes=1.0)])[0]
    if first.obstacle is not None:
        return "", "", first.obstacle if first.obstacle.startswith(RAISED) else ""
    why = yield from _try_slopes(tried, first)
    if why:
        return why, "", ""
    tried = dataclasses.replace(tried, like=dataclasses.replace(tried.like, slopes=1.0))
    kept = yield from _try_what_is_kept(tried, list(dict.fromkeys([*changes, *first.changes])))
    return "", kept, ""


def _try_slopes(tried: TriedLoss, first: TrialOutcome) -> Trials:
    """Compare the gradients of parts with those of the whole."""
    own, factors = _factors_of(tried)
    runs = [dataclasses.replace(tried.like, slopes=own)] if tried.is_sum else []
    runs += [
        dataclasses.replace(tried.like, batch=part, slopes=factor)
        for part, factor in zip(tried.parts, factors, strict=True)
        if factor
    ]
    outcomes = yield runs
    whole, *outcomes = outcomes if tried.is_sum else [first, *outcomes]
    if any(outcome.obstacle is not None for outcome in (whole, *outcomes)):
        return ""
    if len(outcomes) == len(tried.weights) and tried.gap(whole, outcomes) > tried.tolerance:
        values = ", ".join(f"{outcome.value:.6g}" for outcome in outcomes)
        return f"with gradients enabled the loss is {whole.value:.6g} over the whole, and {values} over parts"
    scale = own if tried.is_sum else 1.0
    tolerance = max(tolerance_of(torch.bfloat16 if whole.is_coarse else whole.dtype), _OF_LOSSES * tried.tolerance)
    if whole.is_coarse and not first.own_slopes:
        tolerance = max(tolerance, _COARSE)
    apart = find_apart(whole.slopes, [one.slopes for one in outcomes], scale, tolerance)
    if apart is None:
        return ""
    if (yield from _is_rounding(dataclasses.replace(tried.like, slopes=own), whole, apart[1])):
        return ""
    return apart_text(first.own_slopes or "code of its own in backward", *apart)


def apart_text(what: str, name: str, difference: float) -> str:
    """Return why gradients of parts are not the whole's, for people."""
    return f"{what} changes gradients: that of '{name}' over parts differs from the whole's by {difference:.2g} of it"


def _try_what_is_kept(tried: TriedLoss, changes: Sequence[str]) -> Trials:
    """Compare the second of two batches in parts and whole, where code keeps something of the first."""
    if not changes:
        return ""
    like, kept = tried.like, some_of(list(changes), 3)
    own, factors = _factors_of(tried)
    pairs = [(like.batch, own), *zip(tried.parts, factors, strict=True)]
    whole, *outcomes = yield [
        dataclasses.replace(like, batch=batch, then=second_sample(batch), slopes=factor) for batch, factor in pairs
    ]
    if any(outcome.obstacle is not None for outcome in (whole, *outcomes)):
        return ""
    if tried.gap(whole, outcomes) > tried.tolerance:
        values = ", ".join(f"{outcome.value:.6g}" for outcome in outcomes)
        return (
            f"the model or its loss keeps something of one batch for the next ({kept}): the loss of a second batch is "
            f"{whole.value:.6g} over the whole, and {values} over parts"
        )
    tolerance = max(tolerance_of(whole.dtype), _OF_LOSSES * tried.tolerance)
    apart = find_apart(whole.slopes, [one.slopes for one in outcomes], own if tried.is_sum else 1.0, tolerance)
    again = dataclasses.replace(like, then=second_sample(like.batch), slopes=own)
    if apart is None or (yield from _is_rounding(again, whole, apart[1])):
        return ""
    return (
        f"the model or its loss keeps something of one batch for the next ({kept}): of a second batch, the gradient of "
        f"'{apart[0]}' over parts differs from the whole's by {apart[1]:.2g} of it"
    )


def _is_rounding(
    like: TrialForward, whole: TrialOutcome, difference: float
) -> Generator[list[TrialForward], list[TrialOutcome], bool]:
    """Tell whether another order of the samples changes gradients as much, which says how exact they are."""
    then = None if like.then is None else map_tensors(like.then, turn)
    turned = (yield [dataclasses.replace(like, batch=map_tensors(like.batch, turn), then=then)])[0]
    noise = None if turned.obstacle is not None else find_apart(whole.slopes, [turned.slopes], 1.0, 0.0)
    return noise is not None and noise[1] <= _MOST_NOISE and difference <= ROUNDINGS * noise[1]


def _factors_of(tried: TriedLoss) -> tuple[float, list[float]]:
    """Return what the loss of the whole is multiplied by for its gradients, and those of parts, as steps do."""
    total = sum(tried.weights)
    # A mean weighs its part, and sums are divided by what all count in the end.
    return 1.0 / total if tried.is_sum else 1.0, [1.0 if tried.is_sum else weight / total for weight in tried.weights]
