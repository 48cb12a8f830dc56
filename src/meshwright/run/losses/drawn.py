"""Losses of models that draw whenever they run, tried on parts that draw by place: with the same numbers as the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.apply.randomness.names import LOSS
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.run.losses.enough import enough_samples
from meshwright.run.losses.loss import LossRule
from meshwright.run.losses.trial_forward import TrialOutcome
from meshwright.run.losses.trial_writes import apart_error

__all__: list[str] = []

Tried = list[Any] | None
"""The loss of a share, (loss, its weight) of each of its parts, and the differences of `_differences`; None: nothing is shown."""

_FINE = (torch.float64, torch.float32)
_LARGE = 50.0
"""How much more a loss that was tried without its draws may differ: layers may round to less than what they return [ratio]."""


class Drawn(Protocol):
    """A trial of a batch with random numbers by place."""

    loss: float
    outcome: TrialOutcome
    outputs: list[Tensor]

    @property
    def notes(self) -> Mapping[Any, Any]:
        """What it drew, by call: (module's name, number)."""
        ...


def losses_of(whole: Drawn, pieces: Sequence[Drawn], weights: Sequence[float]) -> Tried:
    """Return the losses of a share and of its parts, whose outputs are those of the share, with what means over parts count.

    None for a loss that draws by itself, is not finite, or comes from coarse numbers; and for a meshwright.Loss, which says
    itself what it counts.
    """
    is_told = any(one.outcome.weight is not None for one in (whole, *pieces))
    draws = any(name == LOSS for name, _ in whole.notes)
    dtypes = {tensor.dtype for tensor in whole.outputs if tensor.is_floating_point()}
    if (
        is_told
        or draws
        or not sum(weights)
        or not dtypes <= {*_FINE}
        or not all(math.isfinite(one.loss) for one in (whole, *pieces))
    ):
        return None
    terms = [[piece.loss, weight] for piece, weight in zip(pieces, weights, strict=True)]
    return [whole.loss, terms, *_differences(whole.outputs, dtypes)]


def _differences(outputs: Sequence[Tensor], dtypes: Set[torch.dtype]) -> tuple[float, float]:
    """Return the relative difference that roundings make at least, and that a loss which is a mean may have at most.

    Between the two may be a small term that is a sum, and such a loss stays untried. On a GPU convolutions round to TF32.
    """
    if dtypes == {torch.float64}:
        return 2e-7, 2e-6
    return 4e-6, 1e-3 if any(tensor.is_cuda for tensor in outputs) else 1e-4


def doubtful_gap(tried: Tried) -> float:
    """Return by how much the loss of parts differs from the whole's where that may be more than roundings; else 0 [fraction]."""
    if tried is None:
        return 0.0
    (gap, _), (_, _, least, most) = _gap_of(tried), tried
    return gap if least < gap <= _LARGE * most else 0.0


def _gap_of(tried: Sequence[Any]) -> tuple[float, float]:
    """Return the relative distance of the parts' mean from the whole's loss, and what it is relative to."""
    whole, parts, *_ = tried
    largest = max(abs(value) for value in (whole, *(loss for loss, _ in parts)))
    mean = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
    return (abs(mean - whole) / largest if largest else 0.0), largest


class LearnsDraws(Protocol):
    """What finds the sample dims of draws; see `meshwright.run.global_draws`."""

    losses: list[Tried]
    apart: str
    is_unproven: bool

    def learn(self, share: Any, splitter: Any, term: Any, weigh: Any = None) -> None:
        """Find them by trials of a share; every rank calls it."""
        ...


def learn_draws(
    draws: LearnsDraws, rule: LossRule, parts: Sequence[Any], splitter: BatchSplitter, term: Any, *, is_cut: bool
) -> None:
    """Find the sample dims of draws, and judge a loss that could not be tried without them; every rank calls it.

    Raises:
        ApplyError: On every rank: the loss is no mean over samples, or gradients of parts do not give the whole's; or nothing
            shows what they give, and ranks might take the batch whole.
    """
    draws.learn(enough_samples(parts, splitter), splitter, term, rule.known_weight if is_cut else None)
    if not is_cut:
        return
    judge_drawn_loss(rule, draws.losses)
    if draws.apart and rule.matters:
        raise rule.refused(apart_error(draws.apart))
    if rule.untried and draws.is_unproven and rule.asks_for_whole:
        error = ApplyError(
            "the model draws random numbers whenever it runs, and with the same ones parts of the first batch do not give what "
            "the whole gives, so that nothing shows that parts give one device's loss"
        )
        raise rule.refused(error, is_in_doubt=True)


def judge_drawn_loss(rule: LossRule, told: Sequence[Tried]) -> None:
    """Refuse a loss that parts do not give, or take back that it could not be tried; with what all ranks have found.

    One that was tried without its draws may have terms while it trains alone: large ones are looked for here, and small ones by
    their gradients (`try_drawn_slopes`).

    Raises:
        ApplyError: It is no mean over samples.
    """
    if not rule.matters:
        return
    is_shown = bool(told) and None not in told
    for tried in [tried for tried in told if tried is not None]:
        error = drawn_error(rule, tried, most=tried[3] * (1.0 if rule.untried else _LARGE))
        if error is not None:
            raise rule.refused(error)
        is_shown = is_shown and _gap_of(tried)[0] <= tried[2]
    if rule.untried and is_shown:
        rule.reasons = tuple(reason for reason in rule.reasons if reason != rule.untried)


def later_error(rule: LossRule, tried: Tried) -> ApplyError | None:
    """Return an error if the loss of a later batch is not what its parts give, beside the losses of the first batch."""
    if tried is None:
        return None
    size = _gap_of(tried)[1]
    scale = max(1.0, rule.size / size) if size else 1.0
    error = drawn_error(rule, tried, most=tried[3] * _LARGE * scale)
    if error is None:
        return None
    return ApplyError(error.message.replace("the first batch", "this batch"), fix=error.fix)


def drawn_error(rule: LossRule, tried: Sequence[Any], *, most: float) -> ApplyError | None:
    """Return an error if parts do not give the loss of the whole with the same random numbers.

    Args:
        rule: The loss.
        tried: What `losses_of` returns.
        most: By how much they may differ [fraction].
    """
    whole, parts, *_ = tried
    gap, largest = _gap_of(tried)
    if gap <= most:
        return None
    is_total = abs(sum(loss for loss, _ in parts) - whole) <= most * largest
    values = ", ".join(f"{loss:.6g}" for loss, _ in parts)
    sizes = ", ".join(f"{count:g}" for _, count in parts)
    kind = "a sum over samples, not their mean" if is_total else "not a mean over samples"
    whose, how = ("what loss_fn returned", "") if rule.is_given else ("the model's own loss", "pass loss_fn=: ")
    return ApplyError(
        f"{whose} is {kind}: with the same random numbers it is {whole:.6g} over all samples of the first "
        f"batch, and {values} over parts of {sizes}, and this plan takes the batch part by part",
        fix=f"{how}return meshwright.Loss(loss, num_samples) from loss_fn, or the mean"
        if is_total
        else f"{how}take the mean over the samples of each term, or return meshwright.Loss(sum, weight)",
    )
