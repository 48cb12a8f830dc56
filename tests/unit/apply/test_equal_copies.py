"""Copies of tensors whose entries share memory, written back and taken from rank 0, without processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.state.buffers import BufferSnapshot


class _OtherRank:
    """Rank 1 of two, to which rank 0 sends bytes."""

    size, group_rank = 2, 1

    def __init__(self, sent: torch.Tensor) -> None:
        self._sent = sent

    def broadcast(self, flat: torch.Tensor) -> None:
        flat.copy_(self._sent.reshape(-1).view(torch.uint8))


def test_an_expanded_tensor_follows_rank_0() -> None:
    # torch does not write into a tensor whose entries share memory: RuntimeError.
    group: Any = _OtherRank(torch.arange(12.0).view(3, 4)[:, :1].expand(3, 4).contiguous())
    buffer = torch.zeros(3, 1).expand(3, 4)
    make_copies_equal([buffer], group)
    assert torch.equal(buffer[:, 0], torch.tensor([0.0, 4.0, 8.0]))
    assert buffer.untyped_storage().nbytes() == 3 * 4


def test_an_expanded_buffer_is_restored_after_a_trial() -> None:
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, 1).expand(3, 4))

    module = Counts()
    before = BufferSnapshot(module)
    version = module.seen._version
    module.seen[0, 0] += 2.0
    before.restore()
    assert torch.equal(module.seen, torch.zeros(3, 4))
    assert module.seen._version == version
