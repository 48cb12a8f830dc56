"""Directories of torch.distributed.checkpoint as a source of a model's weights; its pickles make plain objects alone.

An entry of its files is a zip archive as `torch.save` writes it: a head, which is a pickle, and the tensor as it lies in memory,
with a check sum.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch

from meshwright.checkpoint.bridges.dcp_metadata import UNTYPED, DtypeName, PickledObject, read_pickle
from meshwright.checkpoint.bridges.weight_source import MOST_NAME, PIECE_BYTES, TensorKind, Weights
from meshwright.checkpoint.durable import read_at
from meshwright.checkpoint.manifest import ITEM_BYTES, MOST_BYTES
from meshwright.checkpoint.tensor_files import memory_of
from meshwright.errors import CheckpointError

__all__: list[str] = []

INDEX = ".metadata"
_MOST_CHUNKS = 1 << 16
_MOST_HEAD = 1 << 20
_MOST_NUMBER = 1 << 62
_BROKEN = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    RuntimeError,
    ValueError,
    EOFError,
    KeyError,
    struct.error,
)
"""What reading a damaged archive raises."""


class _Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DcpWeights(Weights):
    """A model in a directory that torch's DCP wrote, with whatever number of ranks.

    Args:
        path: The directory.
        allow_pickle: Whether its index may be read, which is a pickle.
        prefix: What names of the model's tensors begin with there; it is left out. None: what stands under the key "model",
            or everything where the state_dict that was saved is the model's own.

    Raises:
        CheckpointError: It breaks a rule, names what DCP does not need, or pickles are not allowed.
        StorageError: It cannot be read.
    """

    kind: ClassVar[str] = "dcp"

    def __init__(self, path: Path, *, allow_pickle: bool = False, prefix: str | None = None) -> None:
        super().__init__(path)
        if not allow_pickle:
            raise CheckpointError(
                f"{path / INDEX} is a pickle, a format that can run code when it is read (rule: it is read only if asked for); "
                "then only the names that DCP needs are accepted in it, and none of them is called",
                fix="convert it with --allow-pickle, if you trust who wrote it",
            )
        self._chunks: dict[str, list[_Chunk]] = {}
        self._files: dict[str, tuple[Path, int, int]] = {}
        try:
            self._open(prefix)
        except BaseException:
            self.close()
            raise

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path / INDEX} is refused: {reason}")

    def _open(self, prefix: str | None) -> None:
        path, descriptor, size = self.open_inside(INDEX)
        if size > MOST_BYTES:
            self._refuse(f"it has {size} bytes (rule: at most {MOST_BYTES})")
        found = read_pickle(read_at(path, descriptor, 0, size), str(path))
        described = found.get("state_dict_metadata") if isinstance(found, PickledObject) else None
        stored = found.get("storage_data") if isinstance(found, PickledObject) else None
        if not isinstance(described, dict) or not isinstance(stored, dict):
            self._refuse("it has no state_dict_metadata and storage_data")
        places = self._places(stored)
        for name, target in self._wanted(described, found.get("planner_data"), prefix).items():
            self._add(name, target, described[name], places.get(name, {}))
        self._check_files()

    def _wanted(self, described: dict[Any, Any], paths: Any, prefix: str | None) -> dict[str, str]:
        """Return name there -> FQN, for what are the model's tensors."""
        names = [name for name in described if isinstance(name, str)]
        paths = paths if isinstance(paths, dict) else {}
        roots = {name: paths[name] if isinstance(paths.get(name), tuple) and paths[name] else (name,) for name in names}
        if prefix is None:
            has_model = any(len(root) > 1 and root[0] == "model" for root in roots.values())
            nested = sorted({repr(root[0])[:60] for root in roots.values() if len(root) > 1})
            if nested and not has_model:
                self._refuse(
                    f"no key 'model' is in it; keys: {', '.join(nested[:10])}; --prefix says which is the model's"
                )
            prefix = "model." if has_model else ""
        inside = [name for name in names if name.startswith(prefix) and len(name) > len(prefix)]
        wanted = {
            name: name[len(prefix) :]
            for name in inside
            if getattr(described[name], "name", "") != "BytesStorageMetadata"
        }
        gone = Counter(name[:60].partition(".")[0] for name in names if name not in wanted)
        if gone:
            text = ", ".join(f"{count} of {group}" for group, count in list(gone.items())[:10])
            self.notes.append(f"left out, since it is no tensor of the model: {text}")
        return wanted

    def _places(self, stored: dict[Any, Any]) -> dict[str, dict[tuple[int, ...] | None, tuple[str, int, int]]]:
        """Return name -> offsets of a chunk -> file, start and length."""
        found: dict[str, dict[tuple[int, ...] | None, tuple[str, int, int]]] = {}
        for index, info in stored.items():
            if (
                not isinstance(index, PickledObject)
                or not isinstance(info, PickledObject)
                or not isinstance(index.get("fqn"), str)
            ):
                self._refuse("its storage_data are no places")
            name, offsets = index.get("fqn"), index.get("offset")
            if info.get("transform_descriptors"):
                self._refuse(f"{name[:200]!r} is compressed; save it without extensions")
            file = info.get("relative_path")
            if not isinstance(file, str):
                self._refuse(f"the file of {name[:200]!r} is no name")
            key = None if offsets is None else self._numbers(offsets, name)
            start, length = self._numbers((info.get("offset"), info.get("length")), name)
            found.setdefault(name, {})[key] = file, start, length
        return found

    def _numbers(self, values: Any, name: str) -> tuple[int, ...]:
        is_right = isinstance(values, tuple) and all(
            type(value) is int and 0 <= value < _MOST_NUMBER for value in values
        )
        if not is_right or len(values) > 64:
            self._refuse(f"a size or place of {name[:200]!r} is no tuple of whole numbers")
        return values

    def _add(
        self, name: str, target: str, entry: Any, places: dict[tuple[int, ...] | None, tuple[str, int, int]]
    ) -> None:
        properties = entry.get("properties") if isinstance(entry, PickledObject) else None
        state = properties.state if isinstance(properties, PickledObject) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        chunks = entry.get("chunks") if isinstance(entry, PickledObject) else None
        if (
            not isinstance(dtype, DtypeName)
            or dtype == UNTYPED
            or not isinstance(chunks, list)
            or len(target) > MOST_NAME
        ):
            self._refuse(f"{name[:200]!r} has no type or no chunks, or its name is too long")
        if not 0 < len(chunks) <= _MOST_CHUNKS or not all(isinstance(chunk, PickledObject) for chunk in chunks):
            self._refuse(f"{name[:200]!r} has {len(chunks)} chunks (rule: 1 to {_MOST_CHUNKS})")
        shape = self._numbers(entry.get("size"), name)
        if math.prod(max(1, size) for size in shape) > _MOST_NUMBER:
            self._refuse(f"{name[:200]!r} has sizes whose product is over {_MOST_NUMBER}")
        own: list[_Chunk] = []
        for chunk in chunks:
            offsets, sizes = self._numbers(chunk.get("offsets"), name), self._numbers(chunk.get("sizes"), name)
            place = places.get(offsets) or (places.get(None) if len(chunks) == 1 else None)
            if place is None:
                self._refuse(f"a chunk of {name[:200]!r} at {list(offsets)} has no file")
            own.append(_Chunk(offsets, sizes, *place))
        self._check_cover(name, shape, own)
        self.tensors[target] = TensorKind(dtype.dtype, shape)
        self._chunks[target] = own

    def _check_cover(self, name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
        """Refuse chunks that do not hold every entry of a tensor once."""
        if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
            self._refuse(f"a chunk of {name[:200]!r} has another number of dims than its shape {list(shape)}")
        count = sum(math.prod(chunk.sizes) for chunk in chunks)
        starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(shape))
        stops = starts + np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(shape))
        is_right = count == math.prod(shape) and bool((stops <= np.array(shape, dtype=np.int64)).all())
        # A chunk without entries overlaps nothing: its start is not before its own stop.
        for place in range(len(chunks) - 1):
            low = np.maximum(starts[place], starts[place + 1 :])
            high = np.minimum(stops[place], stops[place + 1 :])
            is_right = is_right and not bool((low < high).all(axis=1).any())
        if not is_right:
            self._refuse(f"the chunks of {name[:200]!r} do not hold each of its {math.prod(shape)} entries once")

    def _check_files(self) -> None:
        """Open the files, and refuse places that lie outside of them or over one another."""
        places: dict[str, list[tuple[int, int]]] = {}
        for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
            places.setdefault(chunk.file, []).append((chunk.start, chunk.start + chunk.length))
        for file, own in places.items():
            self._files[file] = path, _, size = self.open_inside(file)
            end = 0
            for start, stop in sorted(own):
                if start < end:
                    self._refuse(f"two entries overlap in {file}: {start} is before {end}")
                end = stop
            if end > size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, {INDEX} has an entry that ends at {end}"
                )

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor in one piece, put together from its chunks; see `Weights.pieces`."""
        kind, chunks = self.tensors[name], self._chunks[name]
        entries = [
            _SavedTensor(*self._files[chunk.file][:2], chunk, kind.dtype) for chunk in chunks
        ]  # checked before memory is taken
        full = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
        for chunk, entry in zip(chunks, entries, strict=True):
            box = full[
                tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            ]
            entry.read_into(box)
        yield full


class _SavedTensor:
    """One entry of a file: an archive that holds a tensor."""

    def __init__(self, path: Path, descriptor: int, chunk: _Chunk, dtype: str) -> None:
        self._where = f"{path}, bytes {chunk.start} to {chunk.start + chunk.length},"
        self._numel = math.prod(chunk.sizes)
        self._dtype = dtype
        try:
            self._archive = zipfile.ZipFile(io.BufferedReader(_Slice(path, descriptor, chunk.start, chunk.length)))
            self._open(chunk.sizes)
        except _BROKEN as error:
            self._refuse(f"are no archive of a tensor: {str(error)[:200]}")

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._where} {reason}")

    def _open(self, sizes: tuple[int, ...]) -> None:
        by_end = {info.filename.partition("/")[2]: info for info in self._archive.infolist()}
        if len(by_end) != len(self._archive.infolist()) or any(
            info.compress_type or info.flag_bits & 1 for info in by_end.values()
        ):
            self._refuse("have compressed records or records of one name")
        if "byteorder" in by_end and self._archive.read(by_end["byteorder"])[:9] != b"little":
            self._refuse("are of a machine with another order of bytes")
        head = by_end["data.pkl"]
        if head.file_size > _MOST_HEAD:
            self._refuse(f"have a head of {head.file_size} bytes (rule: at most {_MOST_HEAD})")
        found = read_pickle(self._archive.read(head), self._where)
        storage, self._offset, shape, self._stride = self._tensor(found)
        self._data = by_end[f"data/{storage}"]
        size = self._numel * ITEM_BYTES[self._dtype]
        if shape != sizes or self._data.file_size != size or self._data.compress_size != size:
            self._refuse(
                f"hold shape {list(shape)[:64]} in {self._data.file_size} bytes, {INDEX} says {list(sizes)} in {size}"
            )

    def _tensor(self, found: Any) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        if (
            not isinstance(found, PickledObject)
            or found.name not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
            or len(found.parts) < 6
        ):
            self._refuse("hold no plain tensor")
        storage, offset, shape, stride, _, _, *rest = found.parts
        dtype = rest.pop(0) if found.name.endswith("3") and rest else None
        parts = storage.parts if isinstance(storage, PickledObject) and storage.name == "storage" else ()
        if len(parts) != 5 or parts[0] != "storage" or not isinstance(parts[2], str) or any(rest):
            self._refuse("hold no plain tensor")
        dtype = parts[1] if dtype is None else dtype
        numbers = (offset, *shape, *stride) if isinstance(shape, tuple) and isinstance(stride, tuple) else (None,)
        if dtype != DtypeName(self._dtype) or not all(type(number) is int and number >= 0 for number in numbers):
            self._refuse(f"hold {str(dtype)[:60]}, {INDEX} says {self._dtype}")
        return parts[2], offset, shape, stride

    def read_into(self, box: torch.Tensor) -> None:
        """Read the tensor into a part of another, and compare it with its check sum."""
        is_plain = not self._offset and self._stride == torch.empty(box.shape, device="meta").stride()
        in_place = is_plain and box.is_contiguous()
        flat = box.view(-1) if in_place else torch.empty(self._numel, dtype=box.dtype)
        memory = memory_of(flat)
        try:
            with self._archive.open(self._data) as stream:
                while memory:
                    data = stream.read(min(PIECE_BYTES, len(memory)))
                    if not data:
                        self._refuse("end within the tensor")
                    memory[: len(data)] = data
                    memory = memory[len(data) :]
            if not in_place:
                box.copy_(flat.as_strided(box.shape, self._stride, self._offset))
        except _BROKEN as error:
            self._refuse(f"are damaged: {str(error)[:200]}")


class _Slice(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, path: Path, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._path, self._descriptor, self._start, self._length = path, descriptor, start, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the begin")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        most = min(len(buffer), max(0, self._length - self._place))
        data = read_at(self._path, self._descriptor, self._start + self._place, most)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
