"""Losses that a configuration can name. They return a sum and a weight, so that cutting a batch changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.run.losses.loss import IGNORED_LABEL, Loss
from meshwright.train.config.imports import import_callable
from meshwright.train.config.targets import resolve_loss
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []


def make_loss(config: TrainConfig) -> Callable[[Any, Any], Any] | None:
    """Return the configuration's loss, `(outputs, batch)` -> Loss or scalar; None for the model's own."""
    name = resolve_loss(config)
    if name == "model":
        return None
    return {"cross_entropy": cross_entropy, "mse": mean_squared_error}.get(name) or import_callable(
        name, config.import_roots
    )


def cross_entropy(outputs: Any, batch: Any) -> Loss:
    """Return the cross entropy in nats, over all targets that are not -100.

    Args:
        outputs: Logits, the classes last [..., classes] or second [batch, classes, ...]; or an object with `.logits`.
        batch: A pair whose second item holds the classes, [...].
    """
    logits: Tensor = getattr(outputs, "logits", outputs)
    targets: Tensor = batch[1]
    if logits.shape[:-1] == targets.shape:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    elif logits.shape[:1] + logits.shape[2:] != targets.shape:
        raise ConfigError(
            f"cross_entropy: logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} "
            "(rule: the logits have one dim more, the classes, last or second)"
        )
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # a sum over many tokens needs the digits
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
    return Loss(total, (targets != IGNORED_LABEL).sum())


def mean_squared_error(outputs: Any, batch: Any) -> Loss:
    """Return the squared error over all elements.

    Args:
        outputs: Predictions, [...].
        batch: A pair whose second item has the predictions' shape.
    """
    targets: Tensor = batch[1]
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"mse: predictions of shape {tuple(outputs.shape)}, targets of shape {tuple(targets.shape)} "
            "(rule: they are equal; broadcasting would average over the wrong pairs)"
        )
    return Loss(F.mse_loss(outputs, targets, reduction="sum"), targets.numel())
