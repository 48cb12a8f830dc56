"""Received tensors: autograd ends at a leaf, and the code that uses the tensor may write into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright._torch_private import without_view

__all__: list[str] = []


class _Arrival(torch.autograd.Function):
    """Turns a leaf into a tensor that is neither leaf nor view, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:  # noqa: ARG004 - autograd goes through it
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - torch's signature
        return gradients[0], None


def with_leaf(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return (leaf, tensor) for a received tensor: the leaf collects the gradient, this stage's code uses the tensor."""
    if data.layout == torch.strided:
        leaf = data.requires_grad_()
        return leaf, without_view(leaf, leaf.shape)  # in C++: each micro-batch comes here, and so does its backward
    leaf = data.new_empty(()).expand(data.shape).requires_grad_()
    return leaf, _Arrival.apply(leaf, data)
