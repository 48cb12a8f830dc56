"""A part of a cut model, run as on one device with parameters gathered for the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.state.attributes import OF_TORCH
from meshwright.comm.communicator import Communicator
from meshwright.comm.functional import gather_from_group
from meshwright.layout import ShardLayout

__all__: list[str] = []


def assign_values(tensor: Tensor, values: Tensor) -> None:
    """Give a leaf other values of another shape, as `tensor.data = values` does, even while a graph reaches it.

    torch keeps the node that accumulates a leaf's gradient, with its old shape, as long as a graph holds it. A change of dtype
    makes torch create a new one.
    """
    if tensor.shape != values.shape and tensor.requires_grad:
        tensor.data = values.new_empty(0, dtype=torch.float32 if values.dtype != torch.float32 else torch.float64)
    tensor.data = values


def gather_parameter(shard: Tensor, layouts: Sequence[ShardLayout], group: Communicator) -> Tensor:
    """Return the whole of a cut parameter; backward keeps this rank's part of the gradient, which all ranks compute alike.

    Args:
        shard: This rank's part.
        layouts: Every rank's part of the full tensor, along one dim.
        group: The ranks; all of them call this.

    Returns:
        The full tensor, of shape `layouts[0].shape`, with a graph to the shard.
    """
    if all(layout.is_whole for layout in layouts):
        return shard
    sizes = [layout.numel for layout in layouts]
    joined = gather_from_group(shard.reshape(-1), group, dim=0, sizes=sizes)
    pieces: list[tuple[int, Tensor]] = []
    dim = next(layout.dim for layout in layouts if layout.dim is not None)
    for block, layout in zip(joined.split(sizes), layouts, strict=True):
        view, position = block.view(layout.block_shape), 0
        for start, stop in layout.ranges:
            pieces.append((start, view.narrow(dim, position, stop - start)))
            position += stop - start
    pieces.sort(key=lambda pair: pair[0])
    return torch.cat([piece for _, piece in pieces if piece.numel()], dim).view(layouts[0].shape)


class _Share(torch.autograd.Function):
    """Scales a parameter's gradient, equal on all ranks here, for a sum over them that comes later."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] / ctx.num_ranks, None


def share(parameter: Tensor, num_ranks: int) -> Tensor:
    """Return the parameter; each of `num_ranks` ranks gets an equal share of its gradient, for a later sum."""
    return _Share.apply(parameter, num_ranks)  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def replaced_tensors(
    module: nn.Module,
    values: Mapping[str, Tensor | None],
    take: Callable[[str, Tensor, Tensor], None] | None = None,
    *,
    in_containers: bool = False,
) -> Iterator[None]:
    """Use other tensors in place of a module's parameters and buffers inside the context.

    Args:
        module: The module.
        values: FQN, from the module on -> the tensor; None hides it.
        take: Called afterwards with the name of each buffer, the tensor that is in its place by then, and the buffer.
        in_containers: Whether modules' own lists, tuples and dicts of parameters have them, too (torch's recurrences keep one).
    """
    slots: list[tuple[dict[str, Any], str, Any]] = []
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        slot: dict[str, Any] = owner._parameters if own in owner._parameters else owner._buffers  # pyright: ignore
        slots.append((slot, own, dict.get(slot, own)))
        slot[own] = value
    pairs = zip((now for *_, now in slots), values.values(), strict=True)
    others = {id(now): value for now, value in pairs if now is not None and value is not None}
    try:
        with _replaced_in_containers(module, others) if in_containers else contextlib.nullcontext():
            yield
        found = [
            (name, dict.get(slot, own), original) for name, (slot, own, original) in zip(values, slots, strict=True)
        ]
    finally:
        for slot, own, original in reversed(slots):
            slot[own] = original
    for name, now, original in found:
        if take is None or now is None or original is None or isinstance(original, nn.Parameter):
            continue
        take(name, now, original)


@contextlib.contextmanager
def _replaced_in_containers(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    slots: list[tuple[dict[str, Any], str, Any]] = []
    for child in module.modules():
        slots += [(vars(child), key, held) for key, held in vars(child).items() if key not in OF_TORCH]
    changed = [(own, key, held, now) for own, key, held in slots if (now := _with_others(held, values)) is not held]
    try:
        for own, key, _, now in changed:
            own[key] = now
        yield
    finally:
        for own, key, held, _ in changed:
            own[key] = held  # also where an inspection inside has put a copy there


def _with_others(held: Any, values: Mapping[int, Tensor], depth: int = 3) -> Any:
    """Return a copy of a container with other tensors in it; itself where it has none of them. Copies of modules share it."""
    if not depth or type(held) not in (list, tuple, dict):
        return held
    entries: list[Any] = [*held.values()] if type(held) is dict else [*held]
    others = [values[id(entry)] if id(entry) in values else _with_others(entry, values, depth - 1) for entry in entries]
    if all(entry is other for entry, other in zip(entries, others, strict=True)):
        return held
    if type(held) is dict:
        return dict(zip(held, others, strict=True))
    return tuple(others) if type(held) is tuple else others
