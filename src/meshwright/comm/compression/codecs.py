"""Codecs: numbers as fewer bytes, and back. They are bf16, and integers of 8 or 4 bits in blocks that share a scale.

A block's scale is its largest magnitude divided by the largest code. Codes are rounded to nearest, so the error of a number is
at most half a scale. Scales have the numbers' own precision. Values that are not finite stay visible: a block with an
Inf or a NaN gets a scale that is not finite, and decodes to no finite value.

Blockwise scales follow Dettmers et al. 2022, arXiv:2110.02861, section 2.1, without their non-linear codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F

__all__: list[str] = []

ALIGNMENT = 8
"""A payload's size is a multiple of this, so that scales of any dtype in the next one are aligned [bytes]."""


class Codec(ABC):
    """A code of numbers."""

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the size of `numel` encoded numbers of a dtype [bytes]."""

    @abstractmethod
    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Encode numbers.

        Args:
            values: [numel], contiguous, floating.
            payload: uint8, [payload_bytes], aligned to `ALIGNMENT`.
        """

    @abstractmethod
    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Decode numbers, encoded with the dtype of `values`, [numel], contiguous, into it."""


class Cast(Codec):
    """Numbers in another floating dtype, or in their own.

    Args:
        dtype: The dtype; None is the gradient's own, without loss.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return _aligned(numel * (self.dtype or dtype).itemsize)

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        self._numbers(payload, values).copy_(values)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(self._numbers(payload, values))

    def _numbers(self, payload: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype or values.dtype
        return payload[: values.numel() * dtype.itemsize].view(dtype)


class _Blocks(Codec):
    """Integers in blocks: all codes of a payload, then all scales. The last block is padded with zeros."""

    block: int
    """Numbers that share a scale [count]."""
    largest_code: int
    code_bytes: int
    """Bytes of a block's codes [bytes]."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return _aligned(self._num_blocks(numel) * (self.code_bytes + dtype.itemsize))

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        count = self._num_blocks(values.numel())
        missing = count * self.block - values.numel()
        blocks = (F.pad(values, (0, missing)) if missing else values).view(count, self.block)
        codes, scales = self._fields(payload, count, values.dtype)
        scratch = self._room(blocks)
        torch.abs(blocks, out=scratch)
        largest = scratch.amax(dim=1)  # NaN if the block contains a NaN
        torch.div(largest, self.largest_code, out=scales)
        # A block of zeros, or one whose largest is so small that its inverse overflows, is sent as zeros. One with an Inf or a
        # NaN gets any codes: its scale tells.
        inverse = torch.nan_to_num(self.largest_code / largest, nan=0.0, posinf=0.0, neginf=0.0)
        torch.mul(blocks, inverse.unsqueeze(1), out=scratch).round_()
        self._write_codes(scratch, codes)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        count = self._num_blocks(values.numel())
        codes, scales = self._fields(payload, count, values.dtype)
        is_full = values.numel() == count * self.block
        blocks = values.view(count, self.block) if is_full else values.new_empty(count, self.block)
        self._read_codes(codes, blocks)
        blocks.mul_(scales.unsqueeze(1))
        if not is_full:
            values.copy_(blocks.view(-1)[: values.numel()])

    @abstractmethod
    def _write_codes(self, rounded: torch.Tensor, codes: torch.Tensor) -> None:
        """Encode whole numbers [k, block], which may be changed, as uint8 [k, code_bytes]."""

    @abstractmethod
    def _read_codes(self, codes: torch.Tensor, numbers: torch.Tensor) -> None:
        """Decode them into [k, block]."""

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _fields(self, payload: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        end = count * self.code_bytes
        return payload[:end].view(count, self.code_bytes), payload[end : end + count * dtype.itemsize].view(dtype)

    def _room(self, blocks: torch.Tensor) -> torch.Tensor:
        key = blocks.device, blocks.dtype
        room = self._scratch.get(key)
        if room is None or room.numel() < blocks.numel():
            room = self._scratch[key] = torch.empty(blocks.numel(), dtype=blocks.dtype, device=blocks.device)
        return room[: blocks.numel()].view(blocks.shape)


class Int8(_Blocks):
    """-127 to 127; 256 numbers share a scale: 260 bytes instead of 1024 in float32."""

    block, largest_code, code_bytes = 256, 127, 256

    def _write_codes(self, rounded: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.int8).copy_(rounded)

    def _read_codes(self, codes: torch.Tensor, numbers: torch.Tensor) -> None:
        numbers.copy_(codes.view(torch.int8))


class Int4(_Blocks):
    """-7 to 7; 128 numbers share a scale: 68 bytes instead of 512 in float32. A byte holds number i and number i + 64."""

    block, largest_code, code_bytes = 128, 7, 64

    def _write_codes(self, rounded: torch.Tensor, codes: torch.Tensor) -> None:
        low, high = rounded[:, : self.code_bytes], rounded[:, self.code_bytes :]
        codes.copy_(low.add_(high, alpha=16).add_(8 + 16 * 8))

    def _read_codes(self, codes: torch.Tensor, numbers: torch.Tensor) -> None:
        numbers[:, : self.code_bytes].copy_(codes & 15)
        numbers[:, self.code_bytes :].copy_(codes >> 4)
        numbers.sub_(8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
