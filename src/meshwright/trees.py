"""Tensors inside containers of user code: found, mapped, moved."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from meshwright._torch_private import set_version
from meshwright.errors import ApplyError

__all__: list[str] = []

LEAVES = frozenset({int, float, bool, str, type(None), complex, torch.dtype, torch.device, torch.layout, torch.Size})
"""Types of what holds no tensor: known at once, where to ask for containers takes longer than the rest."""


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any], *, by_sample: bool = False) -> Any:
    """Return the same containers with `function` applied to each tensor; any other value stays the same object.

    Lists, tuples, named tuples, mappings (Hugging Face's ModelOutput among them) and dataclasses are walked. A
    container without tensors is returned as it is, not copied, so that a cache or a configuration keeps its identity.

    Args:
        tree: The containers.
        function: Applied to each tensor.
        by_sample: Whether `function` takes dim 0 for the sample; a PackedSequence has no such dim.

    Raises:
        ApplyError: `by_sample`, and there is a PackedSequence.
    """
    if type(tree) in LEAVES:
        return tree
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):  # before mappings: whether something is one takes as long as all the rest
        if isinstance(tree, PackedSequence):
            return _map_packed(tree, function, by_sample=by_sample)
        items = [map_tensors(item, function, by_sample=by_sample) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        values = {key: map_tensors(value, function, by_sample=by_sample) for key, value in tree.items()}
        return tree if all(values[key] is tree[key] for key in values) else like_mapping(tree, values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # From where they lie: a class may refuse to be asked (a configuration whose layers differ in a field).
        own = getattr(tree, "__dict__", {})
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        fields = {name: own[name] if name in own else getattr(tree, name) for name in names}
        values = {name: map_tensors(value, function, by_sample=by_sample) for name, value in fields.items()}
        return tree if all(values[name] is fields[name] for name in fields) else dataclasses.replace(tree, **values)
    return tree


def _map_packed(packed: PackedSequence, function: Callable[[torch.Tensor], Any], *, by_sample: bool) -> PackedSequence:
    if by_sample:
        raise ApplyError(
            "a PackedSequence cannot be split or moved sample by sample: its rows mix the samples",
            fix="pass the padded tensor and the lengths, and call pack_padded_sequence inside forward()",
        )
    indices = [None if part is None else function(part) for part in (packed.sorted_indices, packed.unsorted_indices)]
    return PackedSequence(function(packed.data), packed.batch_sizes, *indices)  # torch keeps batch_sizes on the CPU


def like_mapping(example: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the example's class with these entries."""
    # A ModelOutput-like class is a mapping and takes its entries as keywords; a dict takes them as one argument.
    if dataclasses.is_dataclass(example):
        return type(example)(**values)
    if isinstance(example, collections.defaultdict):
        return type(example)(example.default_factory, values)
    return type(example)(values)  # pyright: ignore[reportCallIssue]


def tensors_in(tree: Any, *, by_sample: bool = False) -> Iterator[torch.Tensor]:
    """Yield every tensor inside the containers, in order; `by_sample` as for `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, note, by_sample=by_sample)
    yield from found


def arguments_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a torch function's arguments or results: only in lists, tuples and dicts, which is faster."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from arguments_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from arguments_in(item)


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what is equal for plain tensors that are views of one memory; None for other kinds, and for no entries."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not is_plain or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device


def end_of_memory(tensor: torch.Tensor) -> int:
    """Return the place in its storage behind a strided tensor's last entry [entries]."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)


def distinct_entries(tensor: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of two tensors of one shape without the dims along which the first is expanded.

    torch does not write into a tensor whose entries share memory; into the first of them it does.
    """
    if tensor.layout != torch.strided:
        return tensor, values
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    return tensor, values


def write_entries(tensor: torch.Tensor, values: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy values into a tensor of their shape, whose entries may share memory along a dim: `expand` made it."""
    place, first = distinct_entries(tensor, values)
    place.copy_(first, non_blocking=non_blocking)


def write_back(tensor: torch.Tensor, values: torch.Tensor, version: int) -> None:
    """Give a tensor the values that it had, and its count of writes: a graph that has saved it since may run backward."""
    with torch.no_grad():
        write_entries(tensor.detach(), values)
    set_version(tensor, version)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all tensors inside [bytes]."""
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def move_to(tree: Any, device: torch.device) -> Any:
    """Move every tensor to the device; one that is already there stays the same object."""
    return with_attributes(map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True)), tree)


def with_attributes(made: Any, tree: Any) -> Any:
    """Return a mapping that was made from another one, with the attributes that its class lets it have beside its entries."""
    if made is not tree and isinstance(tree, Mapping) and hasattr(made, "__dict__") and hasattr(tree, "__dict__"):
        vars(made).update({name: value for name, value in vars(tree).items() if name not in vars(made)})
    return made
