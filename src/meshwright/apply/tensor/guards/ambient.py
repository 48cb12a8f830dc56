"""Modes around a call that can decide its code: gradients, inference, autocast and the default dtype of this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__: list[str] = []

_KINDS = ("cpu", "cuda")

Ambient = tuple[Any, ...]
"""Gradients, inference, default dtype, autocast of each kind of device. Compared as a whole, and equal in all processes."""


def current_ambient() -> Ambient:
    """Return the modes around this call."""
    autocast = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _KINDS)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast


def with_gradients(ambient: Ambient, wanted: bool) -> Ambient:
    """Return the same modes with gradients on or off, and without inference mode."""
    return wanted, False, *ambient[2:]


@contextlib.contextmanager
def surrounded_by(ambient: Ambient, *, gradients: bool | None = None) -> Iterator[None]:
    """Run the calls inside the context under these modes; another thread starts without any.

    Args:
        ambient: The modes.
        gradients: Whether gradients are on, in place of the ambient's setting; None keeps that.
    """
    wants_gradients, is_inference, _, autocast = ambient
    with contextlib.ExitStack() as stack:
        if gradients is None and is_inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(wants_gradients if gradients is None else gradients))
        for kind, dtype in zip(_KINDS, autocast, strict=True):
            stack.enter_context(_autocast(kind, dtype))
        yield


@contextlib.contextmanager
def _autocast(kind: str, dtype: torch.dtype | None) -> Iterator[None]:
    # Not torch.autocast, which only warns where the device is missing, and proofs run on the CPU.
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, dtype is not None)
    torch.set_autocast_dtype(kind, dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
