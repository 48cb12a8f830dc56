"""Float32 for trials of models and batches in less: roundings of bfloat16 would hide what code does, or look like it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_LOW = (torch.bfloat16, torch.float16)


def is_low(tensor: Tensor) -> bool:
    """Tell whether a plain tensor has fewer digits than float32; those of a class of their own (quantized ones) stay."""
    return tensor.dtype in _LOW and type(tensor.data) is Tensor and tensor.layout == torch.strided


def has_low(parameters: Iterable[nn.Parameter], batch: Any) -> bool:
    """Tell whether a parameter, or a tensor of a batch, has fewer digits than float32."""
    return any(map(is_low, parameters)) or any(map(is_low, tensors_in(batch)))


def widen(batch: Any) -> Any:
    """Return a batch whose numbers have the digits of float32 at least."""
    return map_tensors(batch, lambda tensor: tensor.float() if is_low(tensor) else tensor)


@contextlib.contextmanager
def widened(module: nn.Module, is_wanted: bool) -> Iterator[None]:
    """Hold parameters and buffers in float32 inside the context where wanted; what code writes into parameters stays, rounded."""
    children = list(module.modules()) if is_wanted else []
    parameters = {id(p): p for child in children for p in dict.values(child._parameters) if p is not None and is_low(p)}
    slots = [
        (child, name, held)
        for child in children
        for name, held in child._buffers.items()
        if held is not None and is_low(held)
    ]
    wide = {id(held): held.float() for _, _, held in slots}  # modules may share one
    before = [(parameter, parameter.data) for parameter in parameters.values()]
    for parameter, data in before:
        parameter.data = data.float()
    for child, name, held in slots:
        child._buffers[name] = wide[id(held)]
    try:
        yield
    finally:
        for child, name, held in slots:
            child._buffers[name] = held
        for parameter, data in before:
            now = parameter.data.to(data.dtype)
            parameter.data = data
            if now.shape != data.shape:
                parameter.data = now
            elif not torch.equal(now, data):
                data.copy_(now)
