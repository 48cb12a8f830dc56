"""Files of tensors in the safetensors format: eight bytes of length, a JSON header, and the tensors' bytes.

Written here, since a file is digested and synced while it is written, and a part of it is read without the rest. The safetensors
library reads what is written, and a test holds both sides together. Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from meshwright.checkpoint.durable import fill_from
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.errors import CheckpointError

__all__: list[str] = []

CODES = {
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "complex64": "C64",
    "complex128": "C128",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""Types of entries, by torch's names -> their codes in a header. C128 is ours alone: the format has no such type."""
METADATA = "__metadata__"
"""Key of a header that names no tensor."""

_ALIGNMENT = 64  # of the first tensor, so that a mapped file can be read as any type


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name in manifests.

    Raises:
        CheckpointError: Checkpoints have no such type.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved (types: {', '.join(ITEM_BYTES)})")
    return name


class DeferredTensor(NamedTuple):
    """A tensor that is read when its turn to be written has come."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterable[torch.Tensor]]
    """Called once; its entries in order, in any number of pieces."""

    @property
    def nbytes(self) -> int:
        """Its size [bytes]."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorFile:
    """One file's tensors, in order.

    Args:
        named: (name, tensor): names are unique in the file; tensors are dense, on any device, and of any shape.
        metadata: Texts that the header holds beside them.

    Raises:
        CheckpointError: A type cannot be saved, or a name is the header's own.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor | DeferredTensor]], metadata: Mapping[str, str] | None = None
    ) -> None:
        self._named = named
        entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
        place = 0
        self.offsets: list[int] = []
        """Where each tensor starts in the file [bytes]."""
        for name, tensor in named:
            if name == METADATA:
                raise CheckpointError(
                    f"a tensor cannot have the name {METADATA!r}: headers of safetensors files use it"
                )
            dtype = tensor.dtype if isinstance(tensor, DeferredTensor) else dtype_name(tensor.dtype)
            entries[name] = {
                "dtype": CODES[dtype],
                "shape": list(tensor.shape),
                "data_offsets": [place, place + tensor.nbytes],
            }
            self.offsets.append(place)
            place += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        self._head = len(header).to_bytes(8, "little") + header
        self.offsets = [len(self._head) + offset for offset in self.offsets]
        self.num_bytes = len(self._head) + place
        """The file's size [bytes]."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for name, tensor in self._named:
            if isinstance(tensor, DeferredTensor):
                yield from _pieces(name, tensor)
            elif tensor.numel():
                yield memory_of(tensor.detach().cpu().contiguous())


def _pieces(name: str, tensor: DeferredTensor) -> Iterator[memoryview]:
    left = tensor.nbytes
    for piece in tensor.read():
        left -= piece.nbytes
        if dtype_name(piece.dtype) != tensor.dtype or left < 0:
            found = f"{tensor.nbytes - left} bytes of {piece.dtype}"
            raise CheckpointError(f"{name!r} gave {found}, not {tensor.nbytes} bytes of {tensor.dtype}")
        if piece.numel():
            yield memory_of(piece.contiguous())
    if left:
        raise CheckpointError(f"{name!r} ended {left} bytes before its end")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, as they lie in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    plain = plain.as_strided(plain.shape, (1,))  # a single entry counts as contiguous with any stride
    return memoryview(cast("Any", plain.view(torch.uint8).numpy())) if plain.numel() else memoryview(b"")


def read_into(descriptor: int, path: Path, offset: int, memory: memoryview) -> None:
    """Fill memory from a file.

    Args:
        descriptor: The open file.
        path: Its path, for messages.
        offset: Where to begin [bytes].
        memory: What to fill.

    Raises:
        CheckpointError: The file ends before that.
        StorageError: It cannot be read.
    """
    filled = fill_from(path, descriptor, offset, memory)
    if filled < len(memory):
        raise CheckpointError(f"{path} is damaged: it ends at {offset + filled} bytes, within a tensor")
