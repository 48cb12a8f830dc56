"""Data sources: their samples, and the part that is held out.

A map-style dataset has `__len__` and `__getitem__(index) -> (inputs, targets)`. A dataset whose samples are always the same
says so with `deterministic_samples = True`; then no random state is prepared for it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import ConfigError, MissingDependencyError
from meshwright.train.config.imports import import_callable
from meshwright.train.config.targets import data_files
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

Split = Literal["train", "eval"]

# Tests repeat themselves, and the contents of site-packages differ between machines.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Text as bytes, cut into windows: inputs are bytes [i, i + length), targets the bytes that follow each of them.

    Args:
        text: The bytes, [num_bytes] of uint8.
        length: Tokens in a sample [bytes].
    """

    deterministic_samples = True

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return max(0, (self.text.numel() - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's 8x8 digits: images [1, 8, 8] in 0..1, and classes 0..9."""

    deterministic_samples = True

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images = images
        self.classes = classes

    def __len__(self) -> int:
        return self.images.size(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


def load_data(config: TrainConfig, split: Split) -> Any:
    """Return the dataset of one split.

    Returns:
        A map-style dataset, or whatever a callable source returns.

    Raises:
        ConfigError: The source has no sample in this split, or returns what is no dataset.
        MissingDependencyError: An optional package is needed.
    """
    data = config.data
    if data.source == "python-stdlib":
        dataset: Any = _text_windows(*_read_stdlib(split, data.max_bytes, data.eval_fraction), data.sequence_length)
    elif data.source == "files":
        dataset = _text_windows(*_read_files(config, split), data.sequence_length)
    elif data.source == "digits":
        dataset = _load_digits(split, data.eval_fraction)
    else:
        dataset = import_callable(data.source, config.import_roots)(split=split, **data.kwargs)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
            raise ConfigError(
                f"data.source = {data.source!r} returned a {type(dataset).__name__} for split '{split}' (rule: a dataset, or "
                "what can be iterated)",
                fix=f"return a dataset from it: def {data.source.rpartition(':')[2]}(split='train'): return TensorDataset(...)",
            )
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ConfigError(
            f"data.source = {data.source!r}: split '{split}' has no sample",
            fix="--set train.eval_batches=0 trains without held-out data" if split == "eval" else None,
        )
    return dataset


def make_collate(config: TrainConfig) -> Callable[[Sequence[Any]], Any] | None:
    """Return the function that makes a batch of samples, where torch's default would not do."""
    if config.model.target.startswith("hf:") and config.data.source in ("python-stdlib", "files"):
        return collate_for_causal_lm
    return None


def collate_for_causal_lm(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return windows as a Hugging Face causal model takes them: it shifts the labels by one itself."""
    ids = torch.stack([torch.cat([inputs, targets[-1:]]) for inputs, targets in samples])
    return {"input_ids": ids, "labels": ids.clone()}


collate_for_causal_lm.__dict__["deterministic_samples"] = True  # it draws nothing, so a thread may read ahead


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Return the standard library's source files, sorted by their path in it, without tests and installed packages."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_held_out(name: str, fraction: float) -> bool:
    """Tell whether a file is held out: by its name's hash, so that other files do not change it."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def _read_stdlib(split: Split, max_bytes: int, fraction: float) -> tuple[Tensor, str]:
    root = Path(sysconfig.get_path("stdlib"))
    chosen = [
        path
        for path in stdlib_files(root)
        if is_held_out(path.relative_to(root).as_posix(), fraction) == (split == "eval")
    ]
    return _concatenate(chosen, _limit(split, max_bytes, fraction)), f"the standard library in {root}"


def _read_files(config: TrainConfig, split: Split) -> tuple[Tensor, str]:
    data = config.data
    limit = _limit(split, data.max_bytes, data.eval_fraction)
    patterns = data.eval_files if split == "eval" and data.eval_files else data.files
    paths = [Path(name) for name in data_files(config, patterns)]
    where = ", ".join(patterns)
    if data.eval_files:
        return _concatenate(paths, limit), where
    parts = []
    for path in paths:
        text = path.read_bytes()
        cut = round(len(text) * (1 - data.eval_fraction))
        parts.append(text[:cut] if split == "train" else text[cut:])
    return _to_tensor(b"".join(parts)[:limit]), where


def _limit(split: Split, max_bytes: int, fraction: float) -> int:
    return max_bytes if split == "train" else max(1, round(max_bytes * fraction / (1 - fraction)))


def _concatenate(paths: Iterable[Path], max_bytes: int) -> Tensor:
    text = bytearray()
    for path in paths:
        if len(text) >= max_bytes:
            break
        text += path.read_bytes()
    return _to_tensor(bytes(text[:max_bytes]))


def _to_tensor(text: bytes) -> Tensor:
    # frombuffer refuses an empty buffer, and a tensor over bytes would be writable memory that must not be written.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _text_windows(text: Tensor, where: str, length: int) -> ByteWindows:
    if text.numel() <= length:
        raise ConfigError(
            f"{where}: {text.numel()} bytes (rule: at least data.sequence_length + 1 = {length + 1})",
            fix="more text, or a smaller data.sequence_length",
        )
    return ByteWindows(text, length)


def _load_digits(split: Split, fraction: float) -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependencyError(
            'data.source = "digits" needs the package scikit-learn', fix="pip install 'meshwright[digits]'"
        ) from None
    bunch: Any = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.as_tensor(bunch.target, dtype=torch.int64)
    # The digits come writer by writer; a fixed permutation puts every writer into both parts.
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    num_held_out = max(1, round(len(order) * fraction))
    chosen = order[:num_held_out] if split == "eval" else order[num_held_out:]
    return Digits(images[chosen], classes[chosen])
