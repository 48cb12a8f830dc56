"""The GPT of `examples/` as a list of layers that pass one tensor on: what the others' pipelines want their user to write."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn


class _RotatedBlock(nn.Module):
    """A block with the rotation's tables, which the whole model would hand to it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: nn.Module, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        return self.block(x, self.cos[:length], self.sin[:length])


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Embedding, blocks, norm, head. They are the model's own: no weight is copied or drawn anew."""
    gpt = cast("Any", model)
    if gpt.head.weight is gpt.embedding.weight:
        raise ValueError("the head is tied to the embedding, and these pipelines cannot share it between stages")
    blocks = [_RotatedBlock(block, gpt.cos, gpt.sin) for block in gpt.layers]
    return [gpt.embedding, *blocks, gpt.norm, gpt.head]


def stages_of(model: nn.Module, num_stages: int) -> list[nn.Sequential]:
    """Cut the layers into stages: blocks evenly, the first stages one more; embedding on the first, norm and head on the last."""
    embedding, *blocks, norm, head = layers_of(model)
    share, rest = divmod(len(blocks), num_stages)
    stages: list[nn.Sequential] = []
    for index in range(num_stages):
        count = share + (index < rest)
        mine, blocks = blocks[:count], blocks[count:]
        if index == 0:
            mine = [embedding, *mine]
        if index == num_stages - 1:
            mine = [*mine, norm, head]
        stages.append(nn.Sequential(*mine))
    return stages
