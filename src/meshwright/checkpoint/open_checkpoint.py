"""One committed checkpoint, open for reading: checked before any tensor of it is touched."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.checkpoint import blocks
from meshwright.checkpoint.durable import open_regular_file, read_small_file, size_of
from meshwright.checkpoint.manifest import (
    ITEM_BYTES,
    MOST_BYTES,
    FileEntry,
    Manifest,
    StoredPart,
    TensorEntry,
    table_bytes,
)
from meshwright.checkpoint.runs import CommonRun, close_together, common_runs, runs_of
from meshwright.checkpoint.tensor_files import memory_of, read_into
from meshwright.errors import CheckpointError
from meshwright.layout import ShardLayout
from meshwright.nn.shards import take_shard

__all__: list[str] = []

MANIFEST_FILE = "manifest.json"
TABLE_SUFFIX = ".blocks"
_GAP_BYTES = 2**14  # that are read rather than left out
_SPAN_BYTES = 2**23
MOST_STEP = 10**18 - 1
_NAME = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")


def name_of(step: int, epoch: int) -> str:
    """Return the name of a checkpoint's directory.

    >>> name_of(12, 1), name_of(12, 3)
    ('step-00000012', 'step-00000012.3')
    """
    return f"step-{step:08d}" + (f".{epoch}" if epoch > 1 else "")


def step_and_epoch(name: str) -> tuple[int, int] | None:
    """Return what `name_of` made a name of, None if it is no checkpoint's.

    >>> step_and_epoch("step-00000012.3"), step_and_epoch("step-000000012"), step_and_epoch("best")
    ((12, 3), None, None)
    """
    match = _NAME.fullmatch(name)
    found = (int(match[1]), int(match[2] or 1)) if match else None
    return found if found and name_of(*found) == name else None


class OpenCheckpoint:
    """A checkpoint whose manifest, tables of digests and sizes of files are right; `check` is for what is in the files.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is damaged, or of another format; the message names the file.
        StorageError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        where = path / MANIFEST_FILE
        self.manifest = Manifest.from_bytes(read_small_file(where, MOST_BYTES), str(where))
        own = name_of(self.manifest.step, self.manifest.epoch)
        if step_and_epoch(path.name) and path.name != own:
            raise CheckpointError(f"{where} is of {own}, its directory has another name", fix=f"name it {own}")
        self._files: list[int] = []
        self._tables: list[bytes] = []
        try:
            for file in self.manifest.files:
                descriptor, table = open_file(path, file)
                self._files.append(descriptor)
                self._tables.append(table)
        except BaseException:
            self.close()
            raise

    def check(self, share: int = 0, num_shares: int = 1) -> None:
        """Compare the files with their digests.

        Args:
            share: Which part of the blocks: ranks that check together take one each.
            num_shares: How many parts there are [count].

        Raises:
            CheckpointError: A block differs; the message names file, place and digests.
            StorageError: It cannot be read.
        """
        for number, file in enumerate(self.manifest.files):
            wanted = range(share, blocks.num_blocks(file.num_bytes), num_shares)
            blocks.check_blocks(self.path / file.name, self._files[number], self._tables[number], wanted)

    def entry(self, name: str) -> TensorEntry:
        """Return what is stored under a name, or under the one that it is another name of.

        Raises:
            CheckpointError: Nothing is.
        """
        stored = self.manifest.aliases.get(name, name)
        entry = self.manifest.tensors.get(stored)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {len(self.manifest.tensors)} others")
        return entry

    def read(self, name: str, wanted: ShardLayout | None = None, order: tuple[int, ...] = ()) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU; only the parts of files that hold it are read.

        Args:
            name: The tensor's name.
            wanted: Which part; the whole tensor if None.
            order: The tensor's dims in the order in which `wanted` has them; () for their own. Where they were stored in
                another order, the whole tensor is read.

        Returns:
            A tensor of the part's local shape; of the tensor's own shape without `wanted`.

        Raises:
            CheckpointError: Nothing is stored under the name, or its shape is another.
            StorageError: It cannot be read.
        """
        entry = self.entry(name)
        own = tuple(range(len(entry.shape)))
        if (order or own) != (entry.order or own):
            stored = self._read(name, entry, ShardLayout.whole(entry.shape))
            plain = stored.permute([entry.order.index(dim) for dim in own]) if entry.order else stored
            turned = plain.permute(order or own).contiguous()
            if wanted is None:
                return turned
            self._require_shape(name, tuple(turned.shape), wanted)
            return take_shard(turned, wanted)
        return self._read(name, entry, ShardLayout.whole(entry.shape) if wanted is None else wanted)

    def _read(self, name: str, entry: TensorEntry, wanted: ShardLayout) -> torch.Tensor:
        self._require_shape(name, entry.shape, wanted)
        tensor = torch.empty(wanted.local_shape, dtype=getattr(torch, entry.dtype))
        memory, size = memory_of(tensor), ITEM_BYTES[entry.dtype]
        runs, filled = runs_of(wanted), 0
        for part in entry.parts:
            for group in close_together(
                common_runs(runs_of(part.layout), runs), _GAP_BYTES // size, _SPAN_BYTES // size
            ):
                filled += sum(run.length for run in group)
                self._fill(part, group, memory, size)
        if filled != wanted.numel:
            raise CheckpointError(f"{filled} of the {wanted.numel} entries of {name!r} were found in {self.path}")
        return tensor

    def _fill(self, part: StoredPart, runs: Sequence[CommonRun], memory: memoryview, size: int) -> None:
        """Fill memory with runs of a stored part, by one read: disks and system calls like that better than many."""
        descriptor, path = self._files[part.file], self.path / self.manifest.files[part.file].name
        first, last = runs[0], runs[-1]
        if len(runs) == 1:
            place = slice(first.right * size, (first.right + first.length) * size)
            read_into(descriptor, path, part.offset + first.left * size, memory[place])
            return
        span = memoryview(bytearray((last.left + last.length - first.left) * size))
        read_into(descriptor, path, part.offset + first.left * size, span)
        for left, right, length in runs:
            start = (left - first.left) * size
            memory[right * size : (right + length) * size] = span[start : start + length * size]

    def _require_shape(self, name: str, shape: tuple[int, ...], wanted: ShardLayout) -> None:
        if wanted.shape != shape:
            raise CheckpointError(f"{name!r} has shape {list(shape)} in {self.path}, here it has {list(wanted.shape)}")

    def close(self) -> None:
        """Close its files."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(directory: Path, file: FileEntry) -> tuple[int, bytes]:
    """Open a checkpoint's file of tensors, and return its descriptor and its table of digests.

    Raises:
        CheckpointError: Its size or its table is not what the manifest says.
        StorageError: It cannot be read.
    """
    path = directory / file.name
    descriptor = open_regular_file(path)
    try:
        size = size_of(path, descriptor)
        if size != file.num_bytes:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, the manifest says {file.num_bytes}")
        table = read_small_file(path.with_name(path.name + TABLE_SUFFIX), table_bytes(file))
        if len(table) != table_bytes(file) or blocks.digest_of(table) != file.table_digest:
            raise CheckpointError(
                f"{path}{TABLE_SUFFIX} is damaged: it does not have the digest that the manifest says"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, table
