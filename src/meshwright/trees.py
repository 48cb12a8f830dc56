"""Tensors inside the containers that users hand us: find, map, split along the samples, and join again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from meshwright.errors import ApplyError

__all__: list[str] = []

LEAVES = frozenset({int, float, bool, str, type(None), complex, torch.dtype, torch.device, torch.layout, torch.Size})
"""Types of what holds no tensor: known at once, where to ask for containers takes longer than the rest."""


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any], *, by_sample: bool = False) -> Any:
    """Return the same containers with `function` applied to each tensor; anything else stays the object that it was.

    Lists, tuples, named tuples, mappings (Hugging Face's ModelOutput among them) and dataclasses are walked. A
    container without tensors is returned as it is, not copied, so that a cache or a configuration keeps its identity.

    Args:
        tree: The containers.
        function: What to do with each tensor.
        by_sample: Whether `function` takes dim 0 for the sample; a PackedSequence has no such dim.

    Raises:
        ApplyError: `by_sample`, and there is a PackedSequence.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in LEAVES:
        return tree
    if isinstance(tree, PackedSequence) and by_sample:
        raise ApplyError(
            "a PackedSequence cannot be split or moved sample by sample: its rows mix the samples",
            fix="pass the padded tensor and the lengths, and call pack_padded_sequence inside forward()",
        )
    if isinstance(tree, PackedSequence):
        indices = [None if part is None else function(part) for part in (tree.sorted_indices, tree.unsorted_indices)]
        return PackedSequence(function(tree.data), tree.batch_sizes, *indices)  # torch keeps batch_sizes on the CPU
    if isinstance(tree, Mapping):
        values = {key: map_tensors(value, function, by_sample=by_sample) for key, value in tree.items()}
        return tree if all(values[key] is tree[key] for key in values) else _like_mapping(tree, values)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, function, by_sample=by_sample) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        values = {name: map_tensors(value, function, by_sample=by_sample) for name, value in fields.items()}
        return tree if all(values[name] is fields[name] for name in fields) else dataclasses.replace(tree, **values)
    return tree


def _like_mapping(example: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    # A ModelOutput-like class is a mapping and takes its entries as keywords; a dict takes them as one argument.
    if dataclasses.is_dataclass(example):
        return type(example)(**values)
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
    """Yield the tensors among a function of torch's arguments or results: in lists, tuples and dicts alone, which costs less."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from arguments_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from arguments_in(item)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all tensors inside [bytes]."""
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def split_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of `parts` contiguous shares of `total` items; they differ by at most 1, the larger ones first.

    >>> split_sizes(7, 3)
    [3, 2, 2]
    >>> split_sizes(2, 4)
    [1, 1, 0, 0]
    """
    small, extra = divmod(total, parts)
    return [small + 1] * extra + [small] * (parts - extra)


def count_samples(tree: Any) -> int:
    """Return dim 0 of the tensors inside, which is the sample [count]; tensors without dims are not counted.

    Raises:
        ApplyError: The tensors disagree, or there is none.
    """
    lengths: dict[int, tuple[int, ...]] = {}
    for tensor in tensors_in(tree, by_sample=True):
        if tensor.dim() > 0:
            lengths.setdefault(tensor.shape[0], tuple(tensor.shape))
    if len(lengths) == 1:
        return next(iter(lengths))
    if not lengths:
        raise ApplyError(
            "the batch holds no tensor with a sample dim, so it cannot be shared out",
            fix="put tensors whose dim 0 is the sample into the batch, or pass split= to apply_plan",
        )
    shapes = ", ".join(str(shape) for shape in lengths.values())
    raise ApplyError(
        f"the tensors of one batch have different sizes in dim 0, which must be the sample: shapes {shapes}",
        fix="make dim 0 the sample in every tensor, or pass split=(batch, num_parts) -> list of batches to apply_plan",
    )


def split_samples(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor along dim 0 into contiguous parts of these sizes; tensors without dims go to every part."""
    parts = []
    start = 0
    for size in sizes:
        stop = start + size

        def cut(tensor: torch.Tensor, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor[start:stop] if tensor.dim() > 0 else tensor

        parts.append(map_tensors(tree, cut, by_sample=True))
        start = stop
    return parts


class BatchSplitter:
    """How batches are counted and cut.

    Args:
        split: ``(batch, num_parts) -> list of batches`` for batches that cannot be cut along dim 0 (graphs, say). How many
            samples such a batch has is its attribute ``num_samples``; else what ``split.count(batch)`` says; else dim 0 of its
            targets: of the second of a pair, or of what a mapping calls label, target or y; else dim 0 of all tensors.
            None cuts dim 0 of every tensor.
    """

    def __init__(self, split: Callable[[Any, int], list[Any]] | None = None) -> None:
        self._split = split

    @property
    def splits_by_row(self) -> bool:
        """Whether batches are cut along dim 0 of every tensor."""
        return self._split is None

    def count(self, batch: Any) -> int:
        """Return the samples of a batch [count]; None is an empty share."""
        if batch is None:
            return 0
        told = getattr(batch, "num_samples", None)
        if told is not None:
            return int(told)
        return count_samples(batch) if self._split is None else self._count_uncut(batch)

    def _count_uncut(self, batch: Any) -> int:
        count = getattr(self._split, "count", None)
        if count is not None:
            return int(count(batch))
        lengths = {tensor.shape[0] for tensor in tensors_in(_targets_of(batch)) if tensor.dim() > 0}
        lengths = lengths or {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0}
        if len(lengths) != 1:
            raise ApplyError(
                f"how many samples a batch has cannot be told: it has no targets, and sizes in dim 0 are {sorted(lengths)}",
                fix="give the batch an attribute num_samples (a class of your own may extend dict), or the function that you "
                "pass as split= an attribute count, batch -> number of samples",
            )
        return lengths.pop()

    def cut(self, batch: Any, num_parts: int) -> list[Any]:
        """Return contiguous parts whose sizes differ by at most 1, the larger first; empty ones are left out."""
        if num_parts == 1:
            return [batch] if self.count(batch) else []
        if self._split is None:
            return split_samples(batch, [size for size in split_sizes(count_samples(batch), num_parts) if size])
        parts = list(self._split(batch, num_parts))
        counts = [self.count(part) for part in parts]
        if len(parts) > num_parts or sum(counts) != self.count(batch):
            raise ApplyError(
                f"split= was to cut a batch of {self.count(batch)} samples into {num_parts} parts, and gave {len(parts)} with "
                f"{counts} samples",
                fix=f"have split(batch, {num_parts}) return at most {num_parts} batches that hold each sample once",
            )
        return [part for part, count in zip(parts, counts, strict=True) if count]


def _targets_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [value for key, value in batch.items() if is_target_name(key)]
    return [batch[1]] if isinstance(batch, (tuple, list)) and len(batch) == 2 and not hasattr(batch, "_fields") else []


def is_target_name(key: Any) -> bool:
    """Tell whether a batch's entry of this name holds what the model should find."""
    name = key.lower() if isinstance(key, str) else ""
    return name == "y" or "label" in name or "target" in name


def join_samples(trees: Sequence[Any], device: torch.device) -> Any:
    """Join the outputs of several devices along dim 0, as one device would have returned them.

    Scalars become a vector with one entry a device, as in nn.DataParallel.
    """
    columns = [list(tensors_in(tree)) for tree in trees]
    if len({len(column) for column in columns}) != 1:
        raise ApplyError(
            "the devices returned different numbers of tensors, so their outputs cannot be joined: "
            f"{[len(column) for column in columns]}",
            fix="return the same structure whatever the samples are",
        )
    position = iter(range(len(columns[0])))

    def join(tensor: torch.Tensor) -> torch.Tensor:
        index = next(position)
        row = [column[index].to(device) for column in columns]
        return torch.stack(row) if tensor.dim() == 0 else torch.cat(row)

    return map_tensors(trees[0], join)


def move_to(tree: Any, device: torch.device) -> Any:
    """Move every tensor to the device; what is there already stays the same object."""
    moved = map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))
    if moved is not tree and isinstance(tree, Mapping) and hasattr(moved, "__dict__") and hasattr(tree, "__dict__"):
        vars(moved).update({name: value for name, value in vars(tree).items() if name not in vars(moved)})
    return moved
