"""gather_batch: what the ranks of a batch have computed, as one device has it, with gradients."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch

from meshwright.comm.functional import all_gather_along
from meshwright.errors import ApplyError, ConfigError
from meshwright.run.losses.loss import LossRule
from meshwright.run.model_collectives import module_of

if TYPE_CHECKING:
    from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = []

_TRIALS = ("meshwright.run.losses.trial", "meshwright.run.draw_trials")


def gather_batch(tensor: torch.Tensor, model: ParallelModel) -> torch.Tensor:
    """Return the rows of all ranks that share a batch, in the order of `split_batch`; for losses over the global batch.

    Gradients go back to the rank that each row comes from. A contrastive loss of gathered features, which each rank computes
    whole, has one device's gradients after ``model.backward(loss, weight=n)``, for any weights; so has a loss of this rank's rows
    beside all rows, a mean over its n rows.

    Args:
        tensor: [rows of this rank, ...]; rows may differ between ranks, other dims may not.
        model: What `apply_plan` returned.

    Returns:
        [rows of all ranks, ...]; `tensor` itself where one rank has the whole batch, as a loss has where ranks
        join their shares.

    Raises:
        ConfigError: It is no tensor, or one without dims.
        ApplyError: Ranks have tensors of other shapes or dtypes, or some require gradients and some do not.
    """
    given: object = tensor
    if not isinstance(given, torch.Tensor):
        raise ConfigError(
            f"gather_batch was given a {type(given).__name__} (rule: one tensor)",
            fix="call it for each tensor; for a number, torch.tensor([number])",
        )
    if tensor.dim() == 0:
        raise ConfigError("gather_batch was given a tensor without dims", fix="give it one row for each sample")
    group = model.engine.group
    if model.engine.has_whole_batch or _is_on_trial(sys._getframe(1)):
        return tensor
    mine = [
        tensor.shape[0],
        list(tensor.shape[1:]),
        str(tensor.dtype),
        tensor.requires_grad and torch.is_grad_enabled(),
    ]
    told = group.all_gather_json(mine, device=model.engine.device)
    other = next((place for place, theirs in enumerate(told) if theirs[1:] != told[0][1:]), None)
    if other is not None:
        raise ApplyError(
            f"gather_batch was given [rows, shape of a row, dtype, requires a gradient] {told[0]} on rank {group.ranks[0]} and "
            f"{told[other]} on rank {group.ranks[other]}",
            fix="compute the tensor alike on every rank, from rows of one shape",
        )
    return all_gather_along(tensor, group, dim=0, sizes=[rows for rows, *_ in told])


def _is_on_trial(caller: FrameType) -> bool:
    """Tell whether a trial runs this code, which each rank does for itself with the rows that it has."""
    frame = caller.f_back
    while frame is not None:
        of = module_of(frame)
        if of.startswith(_TRIALS) or (of == LossRule.__module__ and frame.f_code.co_name == LossRule.try_term.__name__):
            return True
        frame = frame.f_back
    return False
