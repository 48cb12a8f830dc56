"""Pickles of torch.distributed.checkpoint, read without a class or a function of anybody.

Its index `.metadata` and the head of each entry are pickles, and a pickle may call what it can name. Here every name that DCP
writes stands for a plain object of ours, which keeps what it was given, and every other name is refused. So a file can make such
objects and nothing else. Format: torch/distributed/checkpoint/metadata.py and torch/_utils.py, read on torch 2.13.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NamedTuple

from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.errors import CheckpointError

__all__: list[str] = []


class PickledObject:
    """An object of a pickle: which class it would be, and what it was given."""

    __slots__ = ("name", "parts", "state")

    def __init__(self, name: str, parts: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.parts = parts
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Return a field of it; None where it has none."""
        return self.state.get(field) if isinstance(self.state, dict) else None


class DtypeName(NamedTuple):
    """A type of torch that a pickle names."""

    dtype: str


_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("collections", "OrderedDict"),
    *((f"pathlib{sub}", f"{kind}Path") for sub in ("", "._local") for kind in ("Posix", "PurePosix", "Windows")),
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_PUTS = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}
_OPCODES = _PUTS | {
    *(
        "PROTO",
        "FRAME",
        "MARK",
        "STOP",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
    ),
    *(
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
    ),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
}
UNTYPED = DtypeName("")
"""A storage of bytes."""


class _ObjectReader(pickle.Unpickler):
    """Reads a pickle into plain objects."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:  # never calls the base class, which would import
        if (module, name) == ("torch", "Size"):
            return lambda numbers=(): tuple(numbers)
        if module == "torch" and name in ITEM_BYTES:
            return DtypeName(name)
        if module == "torch" and name in _STORAGES:
            return DtypeName(_STORAGES[name])
        if (module, name) in (("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")):
            return UNTYPED
        if (module, name) in _CLASSES:
            # Made anew each time, as what stands for torch.Size is: a pickle may set attributes of what it is given.
            return type(
                "PickledObject", (PickledObject,), {"__slots__": (), "__new__": _maker(name), "__init__": _nothing}
            )
        raise CheckpointError(
            f"{self._where} names {f'{module[:100]}.{name[:100]}'!r}, which a checkpoint of DCP does not need; it is not read",
            fix="do not load this file: what it names would have been called",
        )

    def persistent_load(self, pid: Any) -> Any:
        return PickledObject("storage", tuple(pid) if isinstance(pid, tuple) else ())


def _maker(name: str) -> Any:
    def make(kind: type[PickledObject], *parts: Any) -> PickledObject:
        record = object.__new__(kind)
        PickledObject.__init__(record, name, parts)
        return record

    return make


def _nothing(_record: PickledObject, *_parts: Any) -> None:
    pass


def _check_opcodes(data: bytes, where: str) -> None:
    """Refuse what DCP does not write: the reader takes memory as an opcode says, before it looks for the bytes."""
    num_put = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise CheckpointError(
                f"{where} has the opcode {opcode.name}, which a checkpoint of DCP does not need; it is not read"
            )
        if opcode.name in _PUTS:
            if argument is not None and argument > num_put:
                raise CheckpointError(
                    f"{where} puts something into place {argument} after {num_put} others; it is not read"
                )
            num_put += 1


def read_pickle(data: bytes, where: str) -> Any:
    """Return what a pickle of DCP holds: numbers, texts, containers, and `PickledObject` for objects.

    Args:
        data: The pickle.
        where: The file, for messages.

    Raises:
        CheckpointError: It is damaged, or names anything that DCP does not write.
    """
    try:
        _check_opcodes(data, where)
        return _ObjectReader(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything; nothing but ours is called in it
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {str(error)[:200]}") from None
