"""Host time of calls on next to nothing: an operator, a view and a module's call, forward and backward.

Chains of two kinds differ in one kind of call alone, so that a difference of two times says what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__: list[str] = []

_BLOCKS: Final = 16
"""Of a chain [count]."""

_HEADS: Final = (8, 2, 4)
"""A view of its tensors, as of heads [elements]."""

Timing = Callable[[Callable[[], object]], tuple[float, float]]


def measure_host(time_of: Timing, device: torch.device) -> dict[str, tuple[list[float], float]]:
    """Return the time of each kind of call in forward and in backward, and 0 as the spread [s].

    Args:
        time_of: Returns the time of a call and its spread.
        device: Where the tensors lie.
    """
    weight, scale = torch.randn(8, 8, device=device).requires_grad_(), torch.ones(8, device=device).requires_grad_()

    def operators(values: Tensor) -> Tensor:
        for _ in range(_BLOCKS):
            values = F.layer_norm(F.gelu(torch.mm(values, weight)) + values, (8,), scale)
        return values

    def with_views(values: Tensor) -> Tensor:
        for _ in range(_BLOCKS):
            values = values.view(_HEADS).transpose(1, 2).transpose(1, 2).view(8, 8)
            values = F.layer_norm(F.gelu(torch.mm(values, weight)) + values, (8,), scale)
        return values

    start = torch.randn(8, 8, device=device).requires_grad_()
    plain, viewed = (_both(time_of, chain, start) for chain in (operators, with_views))
    modules = nn.Sequential(*(nn.Identity() for _ in range(4 * _BLOCKS)))
    called, _ = time_of(lambda: modules(start))
    num_calls = 4 * _BLOCKS  # of each kind: a chain has four operators, and the other four views more, for each block
    return {
        "host_operator": ([one / num_calls for one in plain], 0.0),
        "host_view": ([max(0.0, two - one) / num_calls for one, two in zip(plain, viewed, strict=True)], 0.0),
        "host_module": ([called / num_calls, 0.0], 0.0),
    }


def _both(time_of: Timing, chain: Callable[[Tensor], Tensor], start: Tensor) -> tuple[float, float]:
    """Return the time of a chain's forward and of its backward [s]."""
    forward, _ = time_of(lambda: chain(start))
    total, _ = time_of(lambda: chain(start).sum().backward())
    return forward, max(0.0, total - forward)
