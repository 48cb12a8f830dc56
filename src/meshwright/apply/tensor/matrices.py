"""Whole matrices during the step of an optimizer that needs them."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.nn.shards import gather_full, take_shard

__all__: list[str] = []


class WholeMatrices:
    """Gathers cut parameters and gradients before an optimizer's step, and cuts them again after it.

    Every rank of the group takes the same step on the same matrices, so each holds the optimizer's whole state. An elementwise
    optimizer does not need that memory.
    """

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._local: list[tuple[Tensor, Tensor | None]] = []
        self._depth = 0  # torch runs step hooks twice where a step calls its base class's

    @property
    def are_whole(self) -> bool:
        """Whether parameters and gradients are whole now. Shapes cannot tell: one rank may hold all of a tensor."""
        return self._depth > 0

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = [(name, find_tensor(self._cutting.module, name)) for name in self._cutting.layouts]
        return [(name, tensor) for name, tensor in named if isinstance(tensor, nn.Parameter)]

    def enter(self) -> None:
        """Give every parameter its whole value and gradient."""
        self._depth += 1
        if self._depth > 1:
            return
        layouts, group = self._cutting.layouts, self._cutting.group
        for name, parameter in self._parameters():
            gradient = parameter.grad
            self._local.append((parameter.data, gradient))
            parameter.grad = None
            parameter.data = gather_full(parameter.data, layouts[name], group)
            parameter.grad = None if gradient is None else gather_full(gradient, layouts[name], group)

    def leave(self) -> None:
        """Give every parameter its shard of the new value, and its shard of the gradient."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or not self._local:
            return
        layouts, group = self._cutting.layouts, self._cutting.group
        for (name, parameter), (local, gradient) in zip(self._parameters(), self._local, strict=True):
            own = take_shard(parameter.data, layouts[name][group.group_rank])
            parameter.grad = None
            parameter.data = local.copy_(own)
            parameter.grad = gradient
        self._local = []

    def end(self) -> None:
        """Leave, where the optimizer's step has ended and its hook that leaves runs after those that end an own loop's step."""
        self._depth = min(self._depth, 1)
        self.leave()
