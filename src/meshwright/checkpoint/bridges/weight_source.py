"""Weights of a model in somebody's files, open for reading: what every kind of source answers."""

from __future__ import annotations

import abc
import contextlib
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch

from meshwright.checkpoint.durable import open_regular_file, told_of
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.errors import CheckpointError

__all__: list[str] = []

PIECE_BYTES = 1 << 26
"""Most that is read of a tensor at once, where its entries lie together [bytes]."""
MOST_NAME = 4000
"""Longest name of a tensor; manifests add a few letters [characters]."""


class TensorKind(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Entries [count]."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size [bytes]."""
        return self.numel * ITEM_BYTES[self.dtype]


class Weights(abc.ABC):
    """Tensors of a model by their FQNs. A subclass opens the files and fills the fields, in an order that it keeps."""

    kind: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorKind] = {}
        self.aliases: dict[str, str] = {}
        """Further names of tensors, of tied parameters -> the name in `tensors`."""
        self.notes: list[str] = []
        """What a person should know: what is left out, for example."""
        self._opened = contextlib.ExitStack()

    @abc.abstractmethod
    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the entries of a tensor in order, in any number of pieces.

        Raises:
            CheckpointError: The file is damaged.
            StorageError: It cannot be read.
        """

    def open_inside(self, name: str) -> tuple[Path, int, int]:
        """Open a file of this directory.

        Returns:
            Its path, its descriptor, which is closed with the source, and its size [bytes].

        Raises:
            CheckpointError: The name leads out of the directory, or the file is a link or no regular one, or is missing.
            StorageError: It cannot be read.
        """
        path = self.path / name
        is_plain = 0 < len(name) <= 255 and name not in (".", "..") and "/" not in name and name.isprintable()
        if not is_plain:
            raise CheckpointError(f"{self.path} names the file {name[:200]!r} (rule: a file in the same directory)")
        descriptor = open_guarded(path)
        self._opened.callback(os.close, descriptor)
        return path, descriptor, os.fstat(descriptor).st_size

    def close(self) -> None:
        """Close its files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_guarded(path: Path) -> int:
    """Open a file of somebody's for reading, and return its descriptor.

    Raises:
        CheckpointError: It is missing, a link, or no regular file.
        StorageError: It cannot be read.
    """
    with told_of(path, "read"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
    if stat.S_ISLNK(mode):
        raise CheckpointError(
            f"{path} is a symbolic link (rule: no link is followed out of a directory that others made)",
            fix=f"cp -rL {path.parent} COPY, and name the copy",
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is no regular file")
    return open_regular_file(path)
