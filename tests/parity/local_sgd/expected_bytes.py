"""What a rank sends under local SGD: all values in a ring, once in so many steps."""

from __future__ import annotations

from torch import nn

from meshwright.apply.forecast import Forecast
from meshwright.traffic import ring_gradient_bytes


class AveragesForecast(Forecast):
    """Values that are averaged.

    Args:
        module: The user's module.
        num_ranks: Ranks that average [count].
        every: Steps between two averages [count].
    """

    def __init__(self, module: nn.Module, num_ranks: int, every: int) -> None:
        self._bytes = ring_gradient_bytes(sum(p.nbytes for p in module.parameters()), num_ranks) / every

    def sent_bytes(self) -> float | None:
        return self._bytes
