"""Elementwise functions that a probe times: those that take longer than their bytes, as exponentials and norms do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

__all__: list[str] = []

GROUPS: Final = 8

FUNCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "mul": lambda values: values * values.detach().requires_grad_(),
    "pow": lambda values: values.pow(2),
    "mean": lambda values: values.mean(-1, keepdim=True),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "_softmax": lambda values: values.flatten(2).softmax(-1),
    "_log_softmax": lambda values: values.flatten(2).log_softmax(-1),
    "native_layer_norm": lambda values: F.layer_norm(values.flatten(2), (values.shape[2] * values.shape[3],)),
    "native_group_norm": lambda values: F.group_norm(values, GROUPS),
    "native_batch_norm": lambda values: F.batch_norm(values, None, None, training=True),
    "bernoulli_": lambda values: torch.empty_like(values, requires_grad=False).bernoulli_(0.9),
    "max_pool2d_with_indices": lambda values: F.max_pool2d(values, 2),
}
"""ATen's name of an operator -> a call of it, on an image."""


CONVOLUTION_CHANNELS: Final = (4, 8, 16, 32, 64)
"""Of a convolution's input and result [count]."""

_SAMPLES, _SIDE, _KERNEL = 16, 8, 3


def convolution_of(channels: int) -> tuple[Callable[[], tuple[Tensor, Tensor]], float]:
    """Return what makes images and a kernel of so many channels, both with gradients, and the FLOPs of one forward."""

    def tensors() -> tuple[Tensor, Tensor]:
        images = torch.randn(_SAMPLES, channels, _SIDE, _SIDE).requires_grad_()
        return images, torch.randn(channels, channels, _KERNEL, _KERNEL).requires_grad_()

    return tensors, 2.0 * _SAMPLES * _SIDE**2 * channels**2 * _KERNEL**2


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Return images of the same size."""
    return F.conv2d(images, kernel, padding=_KERNEL // 2)


def moved_bytes(values: Tensor, result: Tensor, name: str) -> int:
    """Return what a forward reads and writes, as a description counts it [bytes]."""
    return values.nbytes * (2 if name == "mul" else 1) + result.nbytes
