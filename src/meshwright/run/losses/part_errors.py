"""Errors for losses that parts of the first batch do not give, with a fix for each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.errors import ApplyError
from meshwright.run.losses.loss import WHOLE_BATCH
from meshwright.run.losses.trial_writes import own_generator_error
from meshwright.run.losses.trials import Evidence

__all__: list[str] = []

_FIX = (
    "return meshwright.Loss(sum, weight) from loss_fn, where the loss is a sum over whatever it counts; a loss that compares "
    f"the samples of a batch with each other needs the batch whole: {WHOLE_BATCH}; where samples lie in another dim than the "
    "first (sequences first), pass split= to apply_plan"
)


def mean_error(able: Sequence[tuple[int, Evidence]], *, is_given: bool) -> ApplyError:
    """Return the error for a loss that parts of the first batch do not give, by the evidence of ranks that have some."""

    def worst(evidence: Evidence) -> float:
        return min((gap for _, gap, _ in evidence.gaps), default=math.inf)

    rank, evidence = max(able, key=lambda entry: worst(entry[1]))
    whose = "what loss_fn returned" if is_given else "the model's own loss"
    if evidence.is_total:
        return ApplyError(
            f"{whose} is a sum over samples, not their mean: it is {evidence.numbers} (rank {rank}), and this plan takes it "
            "part by part",
            fix="return meshwright.Loss(loss, num_samples) from loss_fn, or the mean",
        )
    if evidence.own_generator:
        return own_generator_error(evidence.own_generator, f"the loss is {evidence.numbers} (rank {rank})")
    if evidence.culprit == "model":
        return ApplyError(
            f"the model's forward mixes the samples of a batch: the loss is {evidence.numbers} (rank {rank}), so that the parts "
            "which this plan takes do not give one device's loss",
            fix=f"leave the batch whole: {WHOLE_BATCH} (tp and pp do); or have the model treat each sample by itself",
        )
    if evidence.culprit == "branches":
        return ApplyError(
            f"the model's forward branches on values of its batch, and samples decide for one another: the loss is "
            f"{evidence.numbers} (rank {rank}), so that the parts which this plan takes do not give one device's loss",
            fix=f"use {WHOLE_BATCH}; or return meshwright.Loss from loss_fn, where parts may decide for themselves",
        )
    return ApplyError(
        f"{whose} is not a mean over samples: it is {evidence.numbers} (rank {rank}), so that the parts which this plan "
        "takes do not give one device's loss",
        fix=_FIX if is_given else f"pass loss_fn=: {_FIX}",
    )


def sums_error(rank: int, evidence: Evidence) -> ApplyError:
    """Return the error for a Loss whose sums and weights over parts do not give the whole's."""
    return ApplyError(
        f"samples of a batch see one another: sum / weight of the meshwright.Loss that loss_fn returned is {evidence.numbers} "
        f"(rank {rank}), so that the parts which this plan takes do not give one device's loss",
        fix=f"leave the batch whole: {WHOLE_BATCH} (tp and pp do); or have the model and the loss treat each sample by itself",
    )


def class_weights_error(rank: int) -> ApplyError:
    """Return the error for a cross-entropy with weights of its classes."""
    return ApplyError(
        f"the loss is a cross-entropy with weights of its classes (rank {rank}), which torch divides by the sum of the "
        "weights of the labels that are there, not by the samples",
        fix="return meshwright.Loss(F.cross_entropy(..., weight=w, reduction='sum'), w[labels].sum()) from loss_fn",
    )
