"""The loop of a textbook on one device, with SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def losses_of(
    module: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Any, Any], Tensor],
    learning_rate: float = 0.1,
) -> list[float]:
    """Train a module, one step a batch of inputs and targets; return the loss of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(module(batch[0]), batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
