"""Parameters that a forward sets from its batch: parts of the batch would set other values than the whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from meshwright.errors import ApplyError
from meshwright.run.losses.loss import WHOLE_BATCH

__all__: list[str] = []


def find_dependent(
    first: Sequence[tuple[str, torch.Tensor]], other: Sequence[tuple[str, torch.Tensor]], *, left: Collection[str]
) -> str | None:
    """Return the FQN of a parameter that two forwards set to different values, or None.

    Args:
        first: (FQN, value) of the parameters set by one batch.
        other: The same for another batch.
        left: Those that the first forward has left as it set them.
    """
    others = dict(other)
    for name, value in first:
        there = others.get(name)
        if there is None and name in left:
            continue
        if there is None or not torch.allclose(value, there, rtol=1e-6, atol=0.0, equal_nan=True):
            return name
    return None


def refusal_of(names: Sequence[tuple[int, str | None]]) -> ApplyError | None:
    """Return why the batch cannot be cut, where a rank has found a parameter that the batch sets.

    Args:
        names: (rank, FQN or None).
    """
    for rank, name in names:
        if name is not None:
            return ApplyError(
                f"the model's forward sets its parameter '{name}' by the batch that it is given (rank {rank}), as an "
                "initialisation by the first batch does, and this plan gives it parts of the batch",
                fix="run the model once on the whole first batch before apply_plan, on every rank alike, so that it is "
                f"initialised then; or leave the batch whole: {WHOLE_BATCH}",
            )
    return None


def own_generator_error(place: str, numbers: str) -> ApplyError:
    """Return the error for a model that draws from a generator of its own, whose numbers follow the cut of the batch."""
    return ApplyError(
        f"the model's forward draws from a generator of its own, '{place}', which gives each part of a batch other numbers: "
        f"{numbers}, so that the parts which this plan takes do not give one device's loss",
        fix="draw from torch's own generator (torch.randn(..., generator=None)), whose numbers rng='global' gives by place; or "
        f"leave the batch whole: {WHOLE_BATCH}",
    )


class OwnBackwardError(ApplyError):
    """A forward or a loss has run backward itself, whose gradients nobody weighs."""


def own_backward_error() -> OwnBackwardError:
    """Return the error for a forward or a loss that runs backward itself, under a plan that adds up gradients."""
    return OwnBackwardError(
        "the model's forward or the loss runs backward() itself; this plan adds up the gradients of parts or of ranks, "
        "and what that adds to the parameters' gradients would not be weighed",
        fix="add the term to the loss that loss_fn returns; or use the plan 'single'",
    )


def apart_error(why: str) -> ApplyError:
    """Return the error for a model whose losses parts give, and whose gradients or next batches they do not."""
    return ApplyError(
        f"{why}, so that the parts which this plan takes do not give one device's gradients",
        fix=f"leave the batch whole: {WHOLE_BATCH}; or have such code treat each sample by itself, and loss_fn return the mean",
    )
