"""Batches: their forms (keyword arguments, or a pair of inputs and targets), counts of their samples, and their shares."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.errors import ApplyError
from meshwright.layout import even_sizes
from meshwright.trees import map_tensors, memory_key, tensors_in

__all__: list[str] = []


def model_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a batch gives to the model.

    Args:
        batch: A mapping (keywords), or a pair ``(inputs, targets)`` whose inputs are a mapping (keywords), a tuple (positional)
            or one tensor. A tuple or list of one has inputs and no targets. Another object is passed as it is.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    is_pair = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
    if is_pair and len(batch) not in (1, 2):
        raise ApplyError(
            f"a batch that is a {type(batch).__name__} must be a pair (inputs, targets), or have inputs alone; this one has "
            f"{len(batch)} items",
            fix="put several inputs or targets into a tuple of their own: ((ids, mask), labels), (inputs, (labels, weights))",
        )
    inputs = batch[0] if is_pair else batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}


def call_model(module: nn.Module, batch: Any) -> Any:
    """Return the module's outputs for a batch of either form.

    Raises:
        ApplyError: The batch is a mapping with entries that the module's forward does not take.
    """
    args, kwargs = model_inputs(batch)
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        refuse_strange_entries(module, kwargs, error)
        if hasattr(batch, "_fields") or dataclasses.is_dataclass(batch):
            how = "its entries as arguments" if isinstance(batch, tuple) else "it as the one argument"
            error.add_note(
                f"the batch is a {type(batch).__name__}, so the model was called with {how}. Where it holds targets as well, "
                "step on a pair (inputs, targets) made of it, each a tensor, a tuple or a mapping"
            )
        raise


def refuse_strange_entries(module: nn.Module, entries: Mapping[str, Any], error: TypeError) -> None:
    """Raise ApplyError from `error` where a mapping has entries that the module's forward does not take."""
    if strange := _not_taken(module, entries):
        taken = [name for name in entries if name not in strange]
        target = next(filter(is_target_name, strange), strange[0] if taken or len(strange) == 1 else strange[1])
        given = next((name for name in strange if name != target), target)
        inputs = "{" + ", ".join(f"{name!r}: ..." for name in taken) + "}" if taken else f"batch[{given!r}]"
        raise ApplyError(
            f"the batch is a mapping, and {type(module).__name__}.forward takes no {' and no '.join(map(repr, strange))} "
            "(rule: all entries of a mapping are keywords of the model)",
            fix=f"a pair of inputs and targets: ({inputs}, batch[{target!r}]), or let forward take {target}=None",
        ) from error


def _not_taken(module: nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the keywords that a module's forward does not take."""
    try:
        known = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # of no function of Python's
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return []
    return [name for name in kwargs if name not in known]


def count_tokens(batch: Any, num_samples: int) -> int:
    """Return the elements of the first integer input [count]; the samples where no input is integer.

    The first integer input of a token model holds its ids. Targets and labels are not looked at.
    """
    if batch is None:
        return 0
    for tensor in tensors_in(model_inputs(batch)):
        if tensor.dim() > 1 and not tensor.dtype.is_floating_point and tensor.dtype != torch.bool:
            return tensor.numel()
    return num_samples


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
        # Each part counts writes for itself: backward of one must not refuse what the model writes into another.
        parts.append(map_tensors(tree, _Rows(start, start + size), by_sample=True))
        start += size
    return parts


class _Rows:
    """Takes rows of tensors: a tensor in two places stays one, and tensors that share memory count writes together, as before."""

    def __init__(self, start: int, stop: int) -> None:
        self._rows = slice(start, stop)
        self._made: dict[int, torch.Tensor] = {}
        self._memory: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._counted_apart(tensor)[self._rows]
        return self._made[id(tensor)]

    def _counted_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or tensor.is_inference():
            return tensor
        key = memory_key(tensor)
        if key is None:
            return tensor.data
        first = self._memory.setdefault(key, tensor.data)
        return first.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class WatchesBatches(Protocol):
    """Compares the global batches that ranks share out."""

    def mark(self, batch: Any) -> Any:
        """Return what is compared of a global batch, or None."""
        ...

    def take(self, mark: Any) -> None:
        """Take note that the batch of a mark is trained on next."""
        ...


class BatchSplitter:
    """Counts and cuts batches.

    Args:
        split: ``(batch, num_parts) -> list of batches`` for batches that cannot be cut along dim 0 (graphs, say). None cuts dim
            0 of every tensor. The number of samples is the first of these that exists: the batch's attribute ``num_samples``;
            ``split.count(batch)``; dim 0 of its targets (the second of a pair, or a mapping's label, target or y); dim 0 of all
            tensors.
    """

    def __init__(self, split: Callable[[Any, int], list[Any]] | None = None) -> None:
        self._split = split
        self.watch: WatchesBatches | None = None
        """What compares the global batches that `split_batch` and `make_loader` share out."""

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
                "the number of samples of a batch is unknown: its targets (all of its tensors, where it has none) have the sizes "
                f"{sorted(lengths)} in dim 0 (rule: one size)",
                fix="give the batch an attribute num_samples (a class of your own may extend dict), or the function that you "
                "pass as split= an attribute count, batch -> number of samples",
            )
        return lengths.pop()

    def cut(self, batch: Any, num_parts: int) -> list[Any]:
        """Return contiguous parts whose sizes differ by at most 1, the larger first; empty ones are left out."""
        if num_parts == 1:
            return [batch] if self.count(batch) else []
        if self._split is None:
            return split_samples(batch, [size for size in even_sizes(count_samples(batch), num_parts) if size])
        parts = list(self._split(batch, num_parts))
        counts = [self.count(part) for part in parts]
        if len(parts) > num_parts or sum(counts) != self.count(batch):
            raise ApplyError(
                f"split= was called to cut a batch of {self.count(batch)} samples into {num_parts} parts, and returned "
                f"{len(parts)} with {counts} samples",
                fix=f"have split(batch, {num_parts}) return at most {num_parts} batches that hold each sample once",
            )
        return [part for part, count in zip(parts, counts, strict=True) if count]

    def micro_batches(self, batch: Any, num_parts: int, most: int | None) -> list[Any]:
        """Return the parts of a share, none of an empty one; more than `num_parts` where one would exceed `most` samples."""
        num_samples = self.count(batch)
        if num_samples == 0:
            return []
        return self.cut(batch, num_parts if most is None else max(num_parts, math.ceil(num_samples / most)))


def _targets_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [value for key, value in batch.items() if is_target_name(key)]
    return [batch[1]] if isinstance(batch, (tuple, list)) and len(batch) == 2 and not hasattr(batch, "_fields") else []


def is_target_name(key: Any) -> bool:
    """Tell whether a batch's entry of this name holds targets."""
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


class HasShares(Protocol):
    """A model whose ranks share each global batch: what `apply_plan` returns."""

    @property
    def splitter(self) -> BatchSplitter:
        """Cuts its batches."""
        ...

    @property
    def dp_size(self) -> int:
        """Shares of a global batch [count]."""
        ...

    @property
    def dp_rank(self) -> int:
        """This rank's share, by its number."""
        ...


def split_batch(global_batch: Any, model: HasShares) -> Any:
    """Return this rank's share of a global batch, or None where the batch has fewer samples than there are ranks.

    Shares are contiguous and differ by at most one sample, the larger ones first.

    Args:
        global_batch: The batch that all ranks share, the same on each: where it is not, the next step or evaluation is refused.
        model: What `apply_plan` returned.
    """
    shares = model.splitter.cut(global_batch, model.dp_size)
    watch = model.splitter.watch
    if watch is not None:
        watch.take(watch.mark(global_batch))
    return shares[model.dp_rank] if model.dp_rank < len(shares) else None
