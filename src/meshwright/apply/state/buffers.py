"""Buffers by name: user code may write into a buffer, or assign a new tensor to its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import WrapperTensor, without_dispatch_modes, without_function_modes
from meshwright.trees import write_back

__all__: list[str] = []

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose statistics are known to follow a rank's own micro-batch."""


def buffer_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (owner, name) of every buffer; ``getattr(owner, name)`` is its present tensor."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (FQN, buffer) of the persistent buffers; others are caches, whose size may depend on a rank's own batch."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory for its values; placeholders of ZeRO-3 and of pipelines have none."""
    return tensor.layout != torch.strided or (
        0 not in tensor.stride() and tensor.untyped_storage().nbytes() >= tensor.nbytes
    )


def buffer_digests(module: nn.Module) -> list[tuple[str, torch.Tensor, bool, str]]:
    """Return (FQN, buffer, whether it is of one of torch's norms, digest of its values) of each dense buffer with values here."""
    found: list[tuple[str, torch.Tensor, bool, str]] = []
    with without_function_modes(), without_dispatch_modes():  # what is read here is not the model's
        for path, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is None or isinstance(buffer, WrapperTensor) or not holds_values(buffer):
                    continue
                if buffer.layout == torch.strided:
                    held: Any = buffer.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
                    digest = hashlib.blake2b(held, digest_size=8).hexdigest()
                    found.append((f"{path}.{name}" if path else name, buffer, isinstance(owner, _NORMS), digest))
    return found


class BufferSnapshot:
    """The buffers of a module at one moment; of one that another pipeline stage computes, there are no values to keep."""

    def __init__(self, module: nn.Module) -> None:
        slots = ((owner, name, getattr(owner, name)) for owner, name in buffer_slots(module))
        self._held = [
            (owner, name, tensor, _values_of(tensor), tensor._version, dict(vars(tensor)))
            for owner, name, tensor in slots
        ]

    def restore(self) -> None:
        """Restore every name's tensor, its values, and its record."""
        for owner, name, tensor, value, version, known in self._held:
            # BatchNorm writes its statistics uncounted. A pipeline may still need them, of another micro-batch, in a backward.
            if value is not None and (tensor._version != version or not torch.equal(tensor.detach(), value)):
                write_back(tensor, value, version)
            if vars(tensor) != known:
                vars(tensor).clear()
                vars(tensor).update(known)
            owner._buffers[name] = tensor


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(tensor, WrapperTensor) else tensor.detach().clone()
