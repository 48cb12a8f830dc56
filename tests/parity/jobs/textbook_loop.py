"""The loop of a textbook on one device: SGD of rate 0.1, unless another optimizer is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def steps_of(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_parts: int = 1,
) -> Iterator[float]:
    """Train a module, one step a batch of inputs and targets; yield the loss of each step when it has been taken.

    Gradients are there until the next step is asked for. A batch is cut into as many equal parts, whose mean the loss is.
    """
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        parts = (
            zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True)
            if num_parts > 1
            else [(inputs, targets)]
        )
        total = 0.0
        for part in parts:
            loss = loss_fn(module(part[0]), part) / num_parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


def losses_of(
    module: nn.Module, batches: Iterable[tuple[Tensor, Any]], loss_fn: Callable[[Any, Any], Tensor], **options: Any
) -> list[float]:
    """Train a module as `steps_of` does, to the end; return the loss of each step."""
    return list(steps_of(module, batches, loss_fn, **options))
