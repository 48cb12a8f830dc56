"""Losses with exact weights: a sum and a weight, however the batch is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.describe.tree import BatchSplitter
from meshwright.errors import ApplyError

__all__: list[str] = []

IGNORED_LABEL = -100
"""Labels with this value do not count: the default of torch's cross-entropy and of Hugging Face."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over whatever is counted, tokens for example, and that count.

    Return it from `loss_fn` where micro-batches or ranks may hold different counts: the step's loss and gradients are
    ``sum of sums / sum of weights``, which is what one device computes on the whole batch.

    Args:
        sum: The sum of the losses, a scalar tensor with its graph.
        weight: How much was summed: a number, or a scalar tensor. Zero is allowed.

    >>> Loss(torch.tensor(6.0), 3).weight
    3
    """

    sum: torch.Tensor
    weight: float | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LossTerm:
    """What one micro-batch contributes."""

    value: torch.Tensor
    """The scalar to run backward from."""
    weight: float | torch.Tensor
    """Its weight."""
    is_mean: bool
    """True: `value` is a mean over `weight` items. False: it is their sum."""

    def total(self) -> torch.Tensor:
        """Return the sum over the items, without its graph, in float64."""
        value = self.value.detach().double()
        return value * self.weight if self.is_mean else value


class LossRule:
    """Turns what the user's loss returns into a LossTerm.

    Args:
        loss_fn: ``(outputs, batch)`` -> a scalar mean over the samples, or a Loss; None takes the model's own ``.loss``.
        module: The model, whose own loss may count shifted labels.
        splitter: Counts samples.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any] | None, module: nn.Module, splitter: BatchSplitter) -> None:
        self._loss_fn = loss_fn
        self._splitter = splitter
        # Hugging Face's causal models drop the first label of each row before they average.
        kind = str(getattr(module, "loss_type", "") or "") + type(module).__name__
        self._drops_first_label = "CausalLM" in kind or "LMHeadModel" in kind

    def known_weight(self, batch: Any) -> float:
        """Return the weight of a mean over this micro-batch, before the model has run."""
        if self._loss_fn is None and isinstance(batch, Mapping):
            labels = batch.get("labels")
            if isinstance(labels, torch.Tensor) and not labels.dtype.is_floating_point:
                counted = labels[..., 1:] if self._drops_first_label and labels.dim() > 1 else labels
                return float((counted != IGNORED_LABEL).sum())
        return float(self._splitter.count(batch))

    def term(self, outputs: Any, batch: Any, weight: float) -> LossTerm:
        """Return the contribution of a micro-batch whose outputs are there; `weight` is its `known_weight`."""
        loss = _own_loss(outputs) if self._loss_fn is None else self._loss_fn(outputs, batch)
        if isinstance(loss, Loss):
            return LossTerm(_scalar(loss.sum), loss.weight, is_mean=False)
        return LossTerm(_scalar(loss), weight, is_mean=True)


def _own_loss(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ApplyError(
            f"no loss_fn was given, and the model returned no loss of its own (its output is a {type(outputs).__name__})",
            fix="pass loss_fn=(outputs, batch) -> scalar to apply_plan, or put 'labels' into the batch",
        )
    return loss


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ApplyError(
            f"loss_fn must return a scalar tensor or meshwright.Loss, it returned a {type(loss).__name__}",
            fix="return the mean over the samples, or meshwright.Loss(sum, weight)",
        )
    if loss.numel() != 1:
        raise ApplyError(
            f"loss_fn must return one number, it returned a tensor of shape {tuple(loss.shape)}",
            fix="take .mean() over the samples, or return meshwright.Loss(loss.sum(), loss.numel())",
        )
    return loss.reshape(())
