"""Items that a mean counts: samples, or labels that are not ignored, with or without the first of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshwright.describe.batches import BatchSplitter, is_target_name
from meshwright.errors import ApplyError
from meshwright.trees import map_tensors

__all__: list[str] = []

IGNORED_LABEL = -100
"""Labels with this value do not count: the default of torch's cross-entropy and of Hugging Face."""

Path = tuple[Any, ...]
"""Keys and positions that lead from a batch to a tensor inside it."""

Guard = tuple[Path, int, float]
"""Labels whose number must not change: where, which value, and how many of each sample have it."""

_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """The items over which the mean of a micro-batch is taken.

    >>> Counted(("labels",), shifted=True).weigh({"labels": torch.tensor([[5, 6, -100]])}, BatchSplitter())
    1.0
    >>> Counted().weigh({"labels": torch.tensor([[5, 6, -100]])}, BatchSplitter())
    1.0
    """

    path: Path | None = None
    """Where the labels are in the batch; None: samples are counted."""
    shifted: bool = False
    """Whether the first label of each row has no prediction."""
    ignored: int = IGNORED_LABEL
    """The label that does not count."""

    def weigh(self, batch: Any, splitter: BatchSplitter) -> float:
        """Return the weight of a mean over this micro-batch [count]."""
        labels = None if self.path is None else tensor_at(batch, self.path)
        if labels is None:
            return float(splitter.count(batch))
        counted = labels[..., 1:] if self.shifted and labels.dim() > 1 else labels
        return float((counted != self.ignored).sum())

    def __str__(self) -> str:
        if self.path is None:
            return "samples"
        first = ", the first of each row left out" if self.shifted else ""
        return f"entries of {path_text(self.path)} that are not {self.ignored}{first}"


def path_text(path: Path) -> str:
    """Return a path in Python's notation.

    >>> path_text((1, "labels"))
    "batch[1]['labels']"
    """
    return "batch" + "".join(f"[{key!r}]" for key in path)


def tensor_at(batch: Any, path: Path) -> torch.Tensor | None:
    """Return the tensor at a path; None where there is none."""
    for key in path:
        try:
            batch = batch[key] if isinstance(batch, (Mapping, list, tuple)) else getattr(batch, key)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
    return batch if isinstance(batch, torch.Tensor) else None


def tensors_by_path(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield (path, tensor) of every tensor inside, in the order of `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from tensors_by_path(item, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from tensors_by_path(item, (*path, index))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.init:
                yield from tensors_by_path(getattr(tree, field.name), (*path, field.name))


def replace_at(batch: Any, path: Path, value: torch.Tensor) -> Any:
    """Return the batch with another tensor at the path; a tensor that occurs twice keeps its other place."""
    places = iter([found for found, _ in tensors_by_path(batch)])
    return map_tensors(batch, lambda tensor: value if next(places) == path else tensor)


def label_paths(batch: Any, num_samples: int) -> list[Path]:
    """Return the paths of integer labels, one row for each sample: by name, or as the second of a pair."""
    found = []
    for path, tensor in tensors_by_path(batch):
        is_integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
        if is_integer and tensor.dim() > 0 and tensor.shape[0] == num_samples and _is_label(path):
            found.append(path)
    return found


def _is_label(path: Path) -> bool:
    return bool(path) and (path[0] == 1 or any(is_target_name(key) for key in path) or is_decoded(path))


def is_decoded(path: Path) -> bool:
    """Tell whether labels at a path are what a decoder reads, too: so most models of translation call them."""
    return any(isinstance(key, str) and key.lower().startswith(("tgt", "trg")) for key in path)


def find_uneven_labels(guards: Sequence[Guard], parts: Sequence[Any], splitter: BatchSplitter) -> ApplyError | None:
    """Return an error where a micro-batch has more or fewer ignored labels than those of the trials."""
    for path, value, each in guards:
        for part in parts:
            labels = tensor_at(part, path)
            if labels is None:
                continue
            num_ignored, num_samples = int((labels == value).sum()), splitter.count(part)
            if abs(num_ignored - each * num_samples) > _ROUNDING:
                return ApplyError(
                    f"{num_ignored} entries of {path_text(path)} in a micro-batch of {num_samples} samples are {value}, "
                    f"which the loss ignores; in the first batch {each:g} of each sample were, and only then is the loss a "
                    "mean over samples",
                    fix="return meshwright.Loss(sum, weight) from loss_fn, the weight being the labels that count",
                )
    return None
