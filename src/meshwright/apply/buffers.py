"""Buffers by name: user code may write into a buffer, and it may as well assign a new tensor to its name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__: list[str] = []


def buffer_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (owner, name) of every buffer; ``getattr(owner, name)`` is its present tensor."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name


class BufferSnapshot:
    """The buffers of a module as they were at one moment.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        slots = ((owner, name, getattr(owner, name)) for owner, name in buffer_slots(module))
        self._held = [(owner, name, tensor, tensor.detach().clone()) for owner, name, tensor in slots]

    def restore(self) -> None:
        """Give every name its tensor of then, with its values of then."""
        with torch.no_grad():
            for owner, name, tensor, value in self._held:
                tensor.detach().copy_(value)
                owner._buffers[name] = tensor
