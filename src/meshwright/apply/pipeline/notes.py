"""Notes between stages, sent beside tensors: the end of a forward, a failure, a tensor without a gradient.

A note goes where a tensor may be awaited, so that a stage which waits for one that never comes is told. A note has a length that
tensors rarely have, and the transport refuses a message of another length than the awaited one.
"""

from __future__ import annotations

import dataclasses
import struct

import torch
from torch import Tensor

__all__: list[str] = []

_MAGIC = b"mw:note\x9e"
_LAYOUT = struct.Struct("<8sqqqq")
FRAME_BYTES = 61
"""Length of a note: a prime, which tensors of more than one byte an element never have [bytes]."""
UNUSED_BYTES = 59
"""Length of a note UNUSED: another prime, since a transport may tell the length of what has come and nothing else [bytes]."""

END, FAILED, DIGEST, COUNT, UNUSED = 1, 2, 3, 4, 5
_MASK = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """The content of a note."""

    kind: int
    """END, FAILED, DIGEST, COUNT, or UNUSED: a tensor has no gradient, which is not the same as one of zeros."""
    digest: int
    """Of END: of the way that the forward took; of DIGEST: of a tensor's bytes."""
    num_calls: int = 0
    """Calls of layers in the forward that has ended; of COUNT: micro-batches [count]."""
    last: int = -1
    """The last of them, by its number among the layers."""

    def to_tensor(self) -> Tensor:
        """Encode the note as bytes."""
        packed = _LAYOUT.pack(_MAGIC, self.kind, self.digest & _MASK, self.num_calls, self.last)
        length = UNUSED_BYTES if self.kind == UNUSED else FRAME_BYTES
        return torch.frombuffer(bytearray(packed.ljust(length, b"\0")), dtype=torch.uint8)


def read_note(flat: Tensor) -> Note | None:
    """Decode a note from bytes; None where they are not a note."""
    packed = flat[: _LAYOUT.size].numpy().tobytes()
    if len(packed) < _LAYOUT.size or not packed.startswith(_MAGIC):
        return None
    _, kind, digest, num_calls, last = _LAYOUT.unpack(packed)
    return Note(kind, digest, num_calls, last)


def digest_of(tensor: Tensor) -> int:
    """Return a 64-bit digest that changes with any entry of a tensor and with the order of its entries."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(8 - flat.numel() % 8)])
    words = flat.view(torch.int64)
    places = (2 * torch.arange(words.numel(), device=words.device) + 1) * 0x9E3779B97F4A7C1
    return int(((words ^ (words >> 29)) * places).sum()) & _MASK
