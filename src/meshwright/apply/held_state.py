"""Parts of full tensors that a rank holds of parameters and buffers: for checkpoints, which any plan reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from meshwright.apply.state.buffers import persistent_buffers
from meshwright.errors import InternalError
from meshwright.layout import ShardLayout

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A rank's part of one tensor.

    Args:
        name: FQN in the user's model.
        layout: Which part. Its shape is the full tensor's, with the dims in `order`.
        tensor: Live memory of the part, of the layout's local shape.
        owner: The tensor for which the optimizer keeps state.
        order: The full tensor's dims in the order in which they lie in memory, the fastest last; () for its own order.
        has_whole_state: Whether the optimizer's state is of the whole tensor here, though values are cut.
    """

    name: str
    layout: ShardLayout
    tensor: Tensor
    owner: Tensor
    order: tuple[int, ...] = ()
    has_whole_state: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> HeldPart:
        """Return the part of a rank that holds all of a tensor."""
        return cls(name=name, layout=ShardLayout.whole(tensor.shape), tensor=tensor, owner=tensor)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        shape = self.layout.shape
        return tuple(shape[self.order.index(dim)] for dim in range(len(shape))) if self.order else shape

    def inside(self, block: ShardLayout, *, has_whole_state: bool) -> HeldPart:
        """Return this part of a block as a part of the full tensor that the block was cut from.

        Args:
            block: The block, whose shape this part takes for the full one.
            has_whole_state: See `HeldPart`.
        """
        order = self.order or tuple(range(len(block.shape)))
        turned = ShardLayout(
            shape=tuple(block.shape[dim] for dim in order),
            dim=None if block.dim is None else order.index(block.dim),
            ranges=block.ranges,
        )
        if turned.block_shape != self.layout.shape or self.layout.dim is not None:
            raise InternalError(f"'{self.name}' is held as {self.layout}, which is no part of the block {turned}")
        layout = turned.replace(flat=self.layout.flat)
        return dataclasses.replace(self, layout=layout, has_whole_state=has_whole_state)


def whole_parts(module: nn.Module) -> list[HeldPart]:
    """Return the parameters and persistent buffers of a rank that holds all of them; of several names the first counts."""
    first: dict[int, HeldPart] = {}
    for name, tensor in (*module.named_parameters(), *persistent_buffers(module)):
        first.setdefault(id(tensor), HeldPart.whole(name, tensor))
    return list(first.values())


def inside_blocks(
    parts: Sequence[HeldPart], blocks: Mapping[str, ShardLayout], *, has_whole_state: bool
) -> list[HeldPart]:
    """Return parts of a module that was cut as parts of the whole module; empty ones are left out.

    Args:
        parts: This rank's parts of its own blocks.
        blocks: FQN -> this rank's block of the full tensor, where it is cut.
        has_whole_state: See `HeldPart`.
    """
    found = [
        part.inside(blocks[part.name], has_whole_state=has_whole_state) if part.name in blocks else part
        for part in parts
    ]
    return [part for part in found if part.layout.numel or part.layout.is_whole]


def memory_order(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return a dense tensor's dims as they lie in memory, the fastest last; () where that is their own order.

    >>> memory_order((12, 1, 4), (2, 4, 3))
    (0, 2, 1)
    >>> memory_order((12, 3, 1), (2, 4, 3))
    ()
    """
    # Where a dim has size 1 its stride says nothing: it stays before the next one.
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    real = [dim for dim in order if shape[dim] > 1]
    return () if real == sorted(real) else tuple(order)
