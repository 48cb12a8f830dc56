"""One committed checkpoint, open for reading: checked before any tensor of it is touched."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from meshwright.checkpoint import blocks
from meshwright.checkpoint.durable import open_regular_file, read_small_file
from meshwright.checkpoint.manifest import ITEM_BYTES, MOST_BYTES, FileEntry, Manifest, TensorEntry, table_bytes
from meshwright.checkpoint.runs import common_runs, runs_of
from meshwright.checkpoint.tensor_files import memory_of, read_into
from meshwright.errors import CheckpointError
from meshwright.layout import ShardLayout
from meshwright.nn.shards import take_shard

__all__: list[str] = []

MANIFEST_FILE = "manifest.json"
TABLE_SUFFIX = ".blocks"


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
            return turned if wanted is None else take_shard(turned, wanted)
        return self._read(name, entry, ShardLayout.whole(entry.shape) if wanted is None else wanted)

    def _read(self, name: str, entry: TensorEntry, wanted: ShardLayout) -> torch.Tensor:
        if wanted.shape != entry.shape:
            raise CheckpointError(
                f"{name!r} has shape {list(entry.shape)} in {self.path}, here it has {list(wanted.shape)}"
            )
        tensor = torch.empty(wanted.local_shape, dtype=getattr(torch, entry.dtype))
        memory, size = memory_of(tensor), ITEM_BYTES[entry.dtype]
        runs = runs_of(wanted)
        for part in entry.parts:
            path = self.path / self.manifest.files[part.file].name
            for theirs, mine, length in common_runs(runs_of(part.layout), runs):
                read_into(
                    self._files[part.file],
                    path,
                    part.offset + theirs * size,
                    memory[mine * size : (mine + length) * size],
                )
        return tensor

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
        size = os.fstat(descriptor).st_size
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
