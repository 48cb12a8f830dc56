"""Cross-entropy of logits that are sharded along the vocabulary and never gathered.

[Note: exchange] Each row takes two small all-reduces instead of V logits. The first has the largest logit m. The second has,
stacked into one tensor, the sum of exp(x - m) and the target's x - m (zero on all ranks but its owner). With label smoothing it
also has the sum of x - m. Backward exchanges nothing, since these sums determine each rank's part of the gradient,

    p_j (a w_t + b W) - a w_t [j = t] - b w_j     where  a = 1 - label_smoothing,  b = label_smoothing / V,  W = sum of w

with w the weights of the classes (1 without), t the target and p the softmax; it is recomputed from the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.communicator import Communicator
from meshwright.errors import ConfigError, did_you_mean
from meshwright.layout import even_sizes
from meshwright.nn.module import check_indices
from meshwright.values import Problems

__all__: list[str] = []

_REDUCTIONS: Final = ("mean", "sum", "none")


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    group: Communicator,
    *,
    vocab_size: int,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits that are spread over the ranks of a group.

    Args:
        logits_shard: This rank's logits [..., own classes], as a `ColumnParallelLinear` leaves them; the class is the last
            dim, unlike in torch.
        targets: Classes [...], whole numbers; the same on every rank.
        group: The ranks.
        vocab_size: Classes on all ranks together, V [count].
        sizes: Every rank's classes, in group order; None is `even_sizes`: the first V % n ranks have one more. A rank may
            have none.
        ignore_index: Class index of the targets whose rows count nothing.
        label_smoothing: The share of the target that is spread evenly over all classes, 0 to 1.
        reduction: "mean" over the rows that count (weighted by `weight`), "sum", or "none".
        weight: For each class the weight of its rows [V], the same on every rank; None is 1.

    Returns:
        A scalar, or losses [...] with reduction "none"; the same on every rank. Its dtype is that of the logits (under
        autocast float32); half precision is computed in float32.

    Raises:
        ConfigError: Shapes, sizes or options do not fit, or a target is outside 0 .. V - 1 (on the CPU; on a GPU the
            device's own check finds it).
    """
    sizes = even_sizes(vocab_size, group.size) if sizes is None else tuple(sizes)
    _check_options(group, vocab_size, sizes, weight, label_smoothing=label_smoothing, reduction=reduction)
    _check_shapes(logits_shard, targets, group, sizes)
    if group.size == 1:
        losses = F.cross_entropy(
            logits_shard.reshape(-1, vocab_size),
            targets.reshape(-1),
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return losses.reshape(targets.shape) if reduction == "none" else losses
    counted = targets.reshape(-1) != ignore_index
    rows = targets.reshape(-1).masked_fill(~counted, 0)
    check_indices(rows, vocab_size, "target")
    half = logits_shard.dtype in (torch.float16, torch.bfloat16)
    options = _LossOptions(
        group=group,
        start=sum(sizes[: group.group_rank]),
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        weight=None if weight is None else weight.detach().to(torch.float32 if half else logits_shard.dtype),
    )
    losses = _RowLosses.apply(logits_shard.reshape(len(rows), logits_shard.shape[-1]), rows, counted, options)
    result = _reduced(losses, rows, counted, options.weight, reduction)
    if half and not torch.is_autocast_enabled(logits_shard.device.type):
        result = result.to(logits_shard.dtype)
    return result.reshape(targets.shape) if reduction == "none" else result


def _reduced(losses: Tensor, rows: Tensor, counted: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (counted.sum() if weight is None else weight[rows].masked_fill(~counted, 0.0).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LossOptions:
    """Options of the losses, besides logits and targets."""

    group: Communicator
    start: int
    """This rank's first class."""
    vocab_size: int
    label_smoothing: float
    weight: Tensor | None

    def of_targets(self, rows: Tensor) -> Tensor | float:
        """Return the weights of the targets [rows]."""
        return 1.0 if self.weight is None else self.weight[rows]

    def of_own_classes(self, num_own: int) -> Tensor | float:
        """Return the weights of this rank's classes."""
        return 1.0 if self.weight is None else self.weight[self.start : self.start + num_own]

    def total(self) -> Tensor | float:
        """Return the sum of all classes' weights."""
        return float(self.vocab_size) if self.weight is None else self.weight.sum()

    @property
    def factors(self) -> tuple[float, float]:
        """The share of the target, and of every class."""
        return 1.0 - self.label_smoothing, self.label_smoothing / self.vocab_size


class _RowLosses(torch.autograd.Function):
    """One loss for each row, from [rows, own classes]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, counted: Tensor, options: _LossOptions) -> Tensor:
        num_own = logits.shape[1]
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        largest = values.amax(1) if num_own else values.new_full((len(rows),), -torch.inf)
        if len(rows):
            options.group.all_reduce(largest, "max")
        shifted = values - largest.unsqueeze(1)
        is_own = (rows >= options.start) & (rows < options.start + num_own)
        is_known = (rows >= 0) & (rows < options.vocab_size)
        own = torch.where(is_own, rows - options.start, torch.where(is_known, 0, -1)).unsqueeze(1)  # a GPU refuses -1
        sums = values.new_zeros((3 if options.label_smoothing else 2, len(rows)))
        if num_own:
            sums[1] = torch.where(is_own, shifted.gather(1, own).squeeze(1), 0.0)
            if options.label_smoothing:
                sums[2] = (shifted * options.of_own_classes(num_own)).sum(1)
            sums[0] = shifted.exp_().sum(1)
        if len(rows):
            options.group.all_reduce(sums)
        log_sum = sums[0].log()
        share, spread = options.factors
        losses = share * options.of_targets(rows) * (log_sum - sums[1])
        if options.label_smoothing:
            losses = losses + spread * (options.total() * log_sum - sums[2])
        ctx.options = options
        ctx.save_for_backward(logits, rows, counted, largest, log_sum, is_own, own)
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the parameters' names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, rows, counted, largest, log_sum, is_own, own = ctx.saved_tensors
        options: _LossOptions = ctx.options
        share, spread = options.factors
        gradient = gradients[0].masked_fill(~counted, 0.0)
        of_target = gradient * share * options.of_targets(rows)
        of_all = gradient * spread
        result = (logits.to(gradient.dtype) - largest.unsqueeze(1) - log_sum.unsqueeze(1)).exp_()
        result.mul_((of_target + of_all * options.total()).unsqueeze(1))
        if logits.shape[1]:
            result.scatter_add_(1, own, torch.where(is_own, -of_target, 0.0).unsqueeze(1))
            if options.label_smoothing:
                result -= of_all.unsqueeze(1) * options.of_own_classes(logits.shape[1])
        return result.to(logits.dtype), None, None, None


def _check_options(
    group: Communicator,
    vocab_size: int,
    sizes: tuple[int, ...],
    weight: Tensor | None,
    *,
    label_smoothing: float,
    reduction: str,
) -> None:
    problems = Problems("cross-entropy")
    problems.require(vocab_size >= 1, f"vocab_size={vocab_size} (rule: vocab_size is at least 1)")
    problems.require(
        len(sizes) == group.size and sum(sizes) == vocab_size,
        f"sizes={list(sizes)} for {group.size} ranks and {vocab_size} classes (rule: one each, together all)",
        fix="sizes=None",
    )
    problems.require(
        0.0 <= label_smoothing <= 1.0,
        f"label_smoothing={label_smoothing} (rule: 0 <= label_smoothing <= 1)",
        fix="label_smoothing=0.0",
    )
    problems.require(
        reduction in _REDUCTIONS,
        f"reduction='{reduction}' is unknown{did_you_mean(reduction, _REDUCTIONS)}; known: {', '.join(_REDUCTIONS)}",
        fix="reduction='mean'",
    )
    problems.require(
        weight is None or tuple(weight.shape) == (vocab_size,),
        f"weight has shape {[] if weight is None else list(weight.shape)} (rule: [{vocab_size}])",
    )
    problems.check()


def _check_shapes(logits: Tensor, targets: Tensor, group: Communicator, sizes: tuple[int, ...]) -> None:
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise ConfigError(
            f"cross-entropy: targets are {targets.dtype} (rule: classes, whole numbers; probabilities of classes are "
            "not supported)",
            fix="targets.argmax(-1)",
        )
    own = sizes[group.group_rank]
    if tuple(logits.shape) != (*targets.shape, own):
        raise ConfigError(
            f"cross-entropy: logits of shape {list(logits.shape)} and targets of {list(targets.shape)} on rank "
            f"{group.group_rank} of the group (rule: [..., {own}] and [...]; the class is the last dim)"
        )
