"""Files in the safetensors format: headers of others read with suspicion, tensors read in parts, new files as a stream.

The rules are the library's, which reads a file whole or maps it: offsets follow one another without a gap and end with the
file. Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from meshwright.checkpoint.bridges.weight_source import MOST_NAME, PIECE_BYTES, TensorKind, Weights
from meshwright.checkpoint.durable import read_at
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.checkpoint.runs import EntryRun, common_runs, runs_of
from meshwright.checkpoint.strict_json import parse_object
from meshwright.checkpoint.tensor_files import CODES, METADATA, DeferredTensor, TensorFile, memory_of, read_into
from meshwright.errors import CheckpointError
from meshwright.layout import ShardLayout

__all__: list[str] = []

_MOST_HEADER = 100_000_000  # the library's own limit [bytes]
_MOST_DIMS = 64
_MOST_NUMBER = 1 << 62
FORMAT_DTYPES = {code: name for name, code in CODES.items() if code != "C128"}
"""Codes of types that a file may have -> torch's names."""


class _FilePlace(NamedTuple):
    path: Path
    descriptor: int
    offset: int


class SafetensorsWeights(Weights):
    """A plain state_dict in one file.

    Names that the file's metadata calls further names of a tensor, as `safetensors.torch.save_model` writes them, are aliases.

    Args:
        path: The file.

    Raises:
        CheckpointError: It breaks a rule of the format; the message names it.
        StorageError: It cannot be read.
    """

    kind: ClassVar[str] = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._places: dict[str, _FilePlace] = {}
        try:
            self._add_file(path.name)
        except BaseException:
            self.close()
            raise

    def _add_file(self, name: str) -> list[str]:
        """Open a file of the directory, and return the names of its tensors."""
        path, descriptor, size = self.open_inside(name)
        entries, metadata = read_header(path, descriptor, size)
        for tensor, (kind, offset) in entries.items():
            if tensor in self.tensors:
                raise CheckpointError(f"{path} holds {tensor[:200]!r}, and {self._places[tensor].path} does, too")
            self.tensors[tensor] = kind
            self._places[tensor] = _FilePlace(path, descriptor, offset)
        pairs = metadata.items()
        self.aliases |= {other: kept for other, kept in pairs if kept in entries and other not in (*entries, "format")}
        return list(entries)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the entries of a tensor in order, 64 MiB at a time; see `Weights.pieces`."""
        (dtype, _), place = self.tensors[name], self._places[name]
        left, size = self.tensors[name].numel, ITEM_BYTES[dtype]
        offset = place.offset
        while left:
            piece = torch.empty(min(left, PIECE_BYTES // size), dtype=getattr(torch, dtype))
            read_into(place.descriptor, place.path, offset, memory_of(piece))
            yield piece
            offset, left = offset + piece.nbytes, left - piece.numel()

    def read(self, name: str, wanted: ShardLayout | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU; no more than that is read.

        Args:
            name: Its name, or an alias.
            wanted: Which part; the whole tensor if None.

        Raises:
            CheckpointError: There is none of that name, or it has another shape.
            StorageError: It cannot be read.
        """
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {len(self.tensors)} others")
        kind, place = self.tensors[name], self._places[name]
        wanted = ShardLayout(shape=kind.shape) if wanted is None else wanted
        if wanted.shape != kind.shape:
            raise CheckpointError(
                f"{name!r} has shape {list(kind.shape)} in {self.path}, here it has {list(wanted.shape)}"
            )
        tensor = torch.empty(wanted.local_shape, dtype=getattr(torch, kind.dtype))
        memory, size = memory_of(tensor), ITEM_BYTES[kind.dtype]
        for theirs, mine, length in common_runs([EntryRun(0, 0, kind.numel)], runs_of(wanted)):
            part = memory[mine * size : (mine + length) * size]
            read_into(place.descriptor, place.path, place.offset + theirs * size, part)
        return tensor


def read_header(
    path: Path, descriptor: int, num_bytes: int
) -> tuple[dict[str, tuple[TensorKind, int]], dict[str, str]]:
    """Return what a file's header says, checked.

    Args:
        path: The file, for messages.
        descriptor: The open file.
        num_bytes: Its size [bytes].

    Returns:
        Name -> (type and shape, place in the file [bytes]), in the file's order, and the metadata.

    Raises:
        CheckpointError: It breaks a rule of the format.
        StorageError: It cannot be read.
    """
    length = int.from_bytes(read_at(path, descriptor, 0, 8), "little")
    if num_bytes < 8 or length > min(_MOST_HEADER, num_bytes - 8):
        most = min(_MOST_HEADER, max(0, num_bytes - 8))
        raise CheckpointError(f"{path} is refused: its header has {length} bytes (rule: at most {most} in this file)")
    found = parse_object(read_at(path, descriptor, 8, length), f"the header of {path}")
    return _HeaderReader(path).entries(found, 8 + length, num_bytes)


class _HeaderReader:
    """Turns a parsed header into entries, and refuses what breaks a rule."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(
        self, found: dict[str, Any], begin: int, num_bytes: int
    ) -> tuple[dict[str, tuple[TensorKind, int]], dict[str, str]]:
        metadata = found.pop(METADATA, {})
        is_texts = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
        if not is_texts:
            self._refuse(f"its {METADATA} is no object of texts")
        entries = {name: self._entry(name, row, begin) for name, row in found.items()}
        ordered = sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes))
        end = begin
        for name, (kind, offset) in ordered:
            if offset != end:
                self._refuse(
                    f"{name[:200]!r} begins at {offset}, what is before it ends at {end} (rule: no gap, no overlap)"
                )
            end = offset + kind.nbytes
        if end != num_bytes:
            self._refuse(f"its tensors end at {end} bytes, the file has {num_bytes}")
        return dict(ordered), metadata

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path} is refused: {reason}")

    def _entry(self, name: str, row: Any, begin: int) -> tuple[TensorKind, int]:
        if not 0 < len(name) <= MOST_NAME:
            self._refuse(f"the name of a tensor has {len(name)} characters (rule: 1 to {MOST_NAME})")
        shown = repr(name[:200])
        if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"{shown} has not just dtype, shape and data_offsets")
        code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
        if not isinstance(code, str) or code not in FORMAT_DTYPES:
            self._refuse(f"{shown} has type {str(code)[:40]!r} (types: {', '.join(FORMAT_DTYPES)})")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not self._are_numbers(shape):
            self._refuse(f"the shape of {shown} is no list of whole numbers")
        if not isinstance(offsets, list) or len(offsets) != 2 or not self._are_numbers(offsets):
            self._refuse(f"the offsets of {shown} are no pair of whole numbers")
        kind = TensorKind(FORMAT_DTYPES[code], tuple(shape))
        # A size of 0 must not hide others that overflow: torch multiplies them for strides.
        if math.prod(max(1, size) for size in shape) > _MOST_NUMBER or offsets[1] - offsets[0] != kind.nbytes:
            self._refuse(f"{shown} has {offsets[1] - offsets[0]} bytes, its shape and type ask for {kind.nbytes}")
        return kind, begin + offsets[0]

    def _are_numbers(self, values: list[Any]) -> bool:
        return all(type(value) is int and 0 <= value <= _MOST_NUMBER for value in values)


def stream_file(named: Mapping[str, DeferredTensor], aliases: Mapping[str, str]) -> TensorFile:
    """Return a file of tensors that are read one after the other, in the order that the library writes: large entries first.

    Args:
        named: Name -> tensor.
        aliases: Further names of them; the header's metadata holds them, as `safetensors.torch.load_model` expects.

    Raises:
        CheckpointError: The format has no such type.
    """
    for name, tensor in named.items():
        if tensor.dtype not in FORMAT_DTYPES.values():
            raise CheckpointError(
                f"{name!r} has type {tensor.dtype}, which safetensors files do not have",
                fix="keep it in a checkpoint of Meshwright",
            )
    ordered = sorted(named.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    own = {other: kept for other, kept in aliases.items() if kept in named and other != "format"}
    return TensorFile(ordered, {"format": "pt", **own})
