"""Manifest of a checkpoint, as JSON: each tensor's shape, type and parts, each file's size and digest, and the state beside them.

Nothing in it is executed, and nothing leaves its directory. It is read as if its author were hostile: sizes, depth, names,
numbers and overlaps are checked before a file of tensors is opened.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from meshwright.checkpoint import strict_json
from meshwright.checkpoint.blocks import DIGEST_BYTES, digest_of, num_blocks
from meshwright.errors import CheckpointError, ConfigError
from meshwright.garbage import paused_collection
from meshwright.layout import ShardLayout, check_coverage

__all__: list[str] = []

FORMAT = "meshwright.checkpoint"
VERSION = 1
MOST_BYTES = 1 << 30
"""A manifest that is larger is refused unread: one of 100,000 tensors has about 10 MB [bytes]."""
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Types of entries, by torch's names -> their size [bytes]."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_HEAD = b'{"digest":"'
_MIDDLE = b'","manifest":'
_MOST_NUMBER = 1 << 62
_MOST_DIMS = 64
_MOST_NAME = 4096


class FileEntry(NamedTuple):
    """One file of tensors."""

    name: str
    num_bytes: int
    """Its size [bytes]."""
    table_digest: bytes
    """Digest of its table of digests, the file of the same name that ends in `.blocks`."""


class StoredPart(NamedTuple):
    """A part of a tensor, contiguous in a file."""

    file: int
    """Place in `Manifest.files`."""
    offset: int
    """Where it starts in the file [bytes]."""
    layout: ShardLayout
    """Which part of the tensor it is."""


class TensorEntry(NamedTuple):
    """One tensor: its parts hold every entry once."""

    dtype: str
    shape: tuple[int, ...]
    """As it is stored: the dims are in `order`."""
    parts: tuple[StoredPart, ...]
    order: tuple[int, ...] = ()
    """The tensor's own dims in the order in which they are stored; () for their own. Memory in channels_last has another."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The tensor's own shape."""
        return tuple(self.shape[self.order.index(dim)] for dim in range(len(self.shape))) if self.order else self.shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: Steps of the optimizer that have been taken [count].
        epoch: 1 for the first save of this step in its directory, 2 for the second [count].
        plan: The plan's one-line form.
        files: The files.
        tensors: Name -> entry, for example `model/blocks.0.weight`.
        aliases: Further names of tensors, of tied parameters -> the name that they are stored under.
        state: What is no tensor: plan, generators, the loader's place, numbers of the optimizer; JSON values.
    """

    step: int
    epoch: int
    plan: str
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest's file: JSON in which the digest of the rest comes first.

        Raises:
            CheckpointError: The state has a value that JSON has no word for.
        """
        _require_json(self.state, "state")
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "epoch": self.epoch,
                "plan": self.plan,
                "files": [[file.name, file.num_bytes, file.table_digest.hex()] for file in self.files],
                "tensors": {name: _entry_to_json(entry) for name, entry in self.tensors.items()},
                "aliases": dict(self.aliases),
                "state": dict(self.state),
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        return b"".join([_HEAD, digest_of(body).hex().encode(), _MIDDLE, body, b"}\n"])

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest in a file's contents.

        Args:
            data: The contents.
            where: The file's path, for messages.

        Raises:
            CheckpointError: It is damaged, of a newer version, or breaks a rule.
        """
        start = len(_HEAD) + 2 * DIGEST_BYTES + len(_MIDDLE)
        body = data[start:-2]
        written = data[len(_HEAD) : start - len(_MIDDLE)]
        is_framed = data.startswith(_HEAD) and data[start - len(_MIDDLE) : start] == _MIDDLE and data.endswith(b"}\n")
        if not is_framed or written != digest_of(body).hex().encode():
            raise CheckpointError(f"{where} is damaged: its contents do not have the digest that it begins with")
        # Nothing of what is read is garbage, and looking for some among a million lists takes longer than reading them.
        with paused_collection():
            try:
                found = strict_json.parse(body)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{where} is no manifest: {error}") from None
            return _Reader(where).manifest(found)


def _entry_to_json(entry: TensorEntry) -> list[Any]:
    parts = [
        [part.file, part.offset]
        if part.layout.dim is None and part.layout.flat is None
        else [part.file, part.offset, part.layout.dim, part.layout.ranges, part.layout.flat]
        for part in entry.parts
    ]
    return [entry.dtype, entry.shape, parts, *([entry.order] if entry.order else [])]


def _require_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise CheckpointError(
            f"{where} is {str(value)[:40]}, a {type(value).__name__} (rule: dicts, lists, texts, finite numbers and None)",
            fix="save it as a text, or leave it out",
        )


class _Kind(NamedTuple):
    """What tensors of one shape that are cut alike have in common."""

    shape: tuple[int, ...]
    layouts: list[ShardLayout]
    """One for each part."""
    numels: list[int]
    """Their entries [count]."""


class _Reader:
    """Turns parsed JSON into a manifest, and refuses what breaks a rule."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._kinds: dict[str, _Kind] = {}
        # One number for each part of each tensor, in turn.
        self._files: list[int] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def manifest(self, found: Any) -> Manifest:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            self._refuse(f"it is no checkpoint's (rule: format is {FORMAT!r})")
        if found.get("version") != VERSION:
            self._refuse(f"it has version {found.get('version')!r}, this program reads version {VERSION}")
        names = {"format", "version", "step", "epoch", "plan", "files", "tensors", "aliases", "state"}
        if found.keys() != names:
            self._refuse(f"its fields differ: {sorted(found.keys() ^ names)[:5]}")
        kinds = {"plan": str, "files": list, "tensors": dict, "aliases": dict, "state": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(found[name], kind)]
        if wrong:
            self._refuse(f"{wrong[0]!r} is no {kinds[wrong[0]].__name__}")
        files = tuple(self._file(row) for row in found["files"])
        if len({file.name for file in files}) != len(files):
            self._refuse("a file is named twice")
        tensors = {name: self._tensor(name, row, len(files)) for name, row in found["tensors"].items()}
        self._check_places(files)
        aliases = found["aliases"]
        for name, stored in aliases.items():
            if not isinstance(stored, str) or stored not in tensors or name in tensors:
                self._refuse(f"{name!r} is another name of {stored!r}, which is not stored, or it is stored itself")
        return Manifest(
            step=self._number(found["step"], "step"),
            epoch=self._number(found["epoch"], "epoch"),
            plan=found["plan"],
            files=files,
            tensors=tensors,
            aliases=aliases,
            state=found["state"],
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._where} is refused: {reason}")

    def _number(self, value: Any, what: str, most: int = _MOST_NUMBER, name: str | None = None) -> int:
        if type(value) is not int or not 0 <= value <= most:  # True is no number here
            of = "" if name is None else f" of {name[:200]!r}"
            self._refuse(f"{what}{of} is {str(value)[:40]} (rule: a whole number, 0 to {most})")
        return value

    def _file(self, row: Any) -> FileEntry:
        if not isinstance(row, list) or len(row) != 3:
            self._refuse("a file is no list of name, size and digest")
        name, size, digest = row
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            self._refuse(f"{str(name)[:60]!r} is no file's name (rule: letters, digits, - and _, then .safetensors)")
        if not isinstance(digest, str) or not re.fullmatch(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}", digest):
            self._refuse(f"the digest of {name} is {str(digest)[:40]!r}")
        return FileEntry(name, self._number(size, f"the size of {name}"), bytes.fromhex(digest))

    def _tensor(self, name: str, row: Any, num_files: int) -> TensorEntry:
        if not 0 < len(name) <= _MOST_NAME or not isinstance(row, list) or len(row) not in (3, 4):
            self._refuse(f"tensor {name[:60]!r} is no list of type, shape and parts, or its name is too long")
        dtype, shape, parts = row[:3]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self._refuse(f"tensor {name[:200]!r} has type {str(dtype)[:40]!r}")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not isinstance(parts, list) or not parts:
            self._refuse(f"tensor {name[:200]!r} has no shape or no parts")
        files, starts = self._places(name, parts, num_files)
        # A model has few kinds of tensors, and checking one takes a while. As text, 1 is neither true nor 1.0.
        key = repr([shape, [part[2:] for part in parts]])
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._kind(name, shape, parts)
        size = ITEM_BYTES[dtype]
        self._files += files
        self._starts += starts
        self._sizes += [size * numel for numel in kind.numels]
        order = self._order(name, row[3], len(kind.shape)) if len(row) == 4 else ()
        return TensorEntry(dtype, kind.shape, tuple(map(StoredPart, files, starts, kind.layouts)), order)

    def _order(self, name: str, order: Any, num_dims: int) -> tuple[int, ...]:
        is_order = isinstance(order, list) and all(type(dim) is int for dim in order) and len(order) == num_dims
        if not is_order or sorted(order) != list(range(num_dims)):
            self._refuse(f"the order of the dims of {name[:200]!r} is {str(order)[:60]}")
        return tuple(order)

    def _places(self, name: str, parts: list[Any], num_files: int) -> tuple[list[int], list[int]]:
        """Return the file and the offset of each part."""
        files: list[int] = []
        starts: list[int] = []
        for part in parts:
            if not isinstance(part, list) or len(part) not in (2, 5):
                self._refuse(f"a part of {name[:200]!r} is no list of file and offset, and of dim, ranges and interval")
            files.append(self._number(part[0], "the file of a part", num_files - 1, name))
            starts.append(self._number(part[1], "an offset", _MOST_NUMBER, name))
        return files, starts

    def _kind(self, name: str, shape: list[Any], parts: Sequence[list[Any]]) -> _Kind:
        sizes = tuple(self._number(size, "a size", _MOST_NUMBER, name) for size in shape)
        # Sizes beside a 0 are bounded, too: programs multiply them in another order.
        entries = math.prod(max(1, size) for size in sizes)
        if entries > _MOST_NUMBER // max(ITEM_BYTES.values()):
            self._refuse(f"tensor {name[:200]!r} has {entries} entries")
        layouts = self._layouts_of(name, sizes, parts)
        return _Kind(sizes, layouts, [layout.numel for layout in layouts])

    def _layouts_of(self, name: str, shape: tuple[int, ...], parts: Sequence[list[Any]]) -> list[ShardLayout]:
        try:
            layouts = [self._layout(name, shape, *part[2:]) for part in parts]
            check_coverage(layouts)
        except ConfigError as error:
            self._refuse(f"the parts of {name[:200]!r} do not make a whole: {error.message}")
        return layouts

    def _layout(
        self, name: str, shape: tuple[int, ...], dim: Any = None, ranges: Any = (), flat: Any = None
    ) -> ShardLayout:
        pairs = [*self._pairs(name, ranges or []), *self._pairs(name, [flat])]
        for number in [dim, *itertools.chain.from_iterable(pairs)]:
            if number is not None:
                self._number(number, f"a place in {name[:200]!r}")
        return ShardLayout(shape=shape, dim=dim, ranges=ranges, flat=flat)

    def _pairs(self, name: str, ranges: Any) -> list[list[Any]]:
        is_list = isinstance(ranges, list) and all(
            pair is None or (isinstance(pair, list) and len(pair) == 2) for pair in ranges
        )
        if not is_list:
            self._refuse(f"the ranges of {name[:200]!r} are no pairs of numbers")
        return [pair for pair in ranges if pair is not None]

    def _check_places(self, files: Sequence[FileEntry]) -> None:
        """Refuse parts that lie outside of their file, or over one another."""
        own, starts = np.array(self._files, dtype=np.int64), np.array(self._starts, dtype=np.int64)
        stops = starts + np.array(self._sizes, dtype=np.int64)  # below 2**63, as both are at most 2**62
        order = np.lexsort((stops, starts, own))
        own, starts, stops = own[order], starts[order], stops[order]
        borders = np.searchsorted(own, np.arange(len(files) + 1)).tolist()
        for file, first, last in zip(files, borders, borders[1:], strict=False):
            if first == last:
                continue
            # Where the parts before each one end, or the length of the header does.
            ends = np.maximum.accumulate(np.concatenate(([8], stops[first:last])))
            wrong = np.flatnonzero((starts[first:last] < ends[:-1]) & (starts[first:last] < stops[first:last]))
            if wrong.size:
                start, end = starts[first + wrong[0]], ends[wrong[0]]
                self._refuse(f"two parts overlap in {file.name}, or lie in its header: {start} is before {end}")
            if ends[-1] > file.num_bytes:
                self._refuse(f"a part ends at {ends[-1]} in {file.name}, which has {file.num_bytes} bytes")


def table_bytes(file: FileEntry) -> int:
    """Return the size of a file's table of digests [bytes]."""
    return num_blocks(file.num_bytes) * DIGEST_BYTES
