"""Files of tensors in the safetensors format: eight bytes of length, a JSON header, and the tensors' bytes.

Written here, since a file is digested and synced while it is written, and a part of it is read without the rest. The safetensors
library reads what is written, and a test holds both sides together. Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from meshwright.checkpoint.durable import fill_from
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.errors import CheckpointError

__all__: list[str] = []

_CODES = {
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


class TensorFile:
    """One file's tensors, in order.

    Args:
        named: (name, tensor): names are unique in the file; tensors are dense, on any device, and of any shape.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [tensor for _, tensor in named]
        entries: dict[str, Any] = {}
        place = 0
        self.offsets: list[int] = []
        """Where each tensor starts in the file [bytes]."""
        for name, tensor in named:
            entries[name] = {
                "dtype": _CODES[dtype_name(tensor.dtype)],
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
        for tensor in self._tensors:
            if tensor.numel():
                yield memory_of(tensor.detach().cpu().contiguous())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, as they lie in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
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
