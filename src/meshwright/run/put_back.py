"""Modes, buffers and random states restored after a step or a look at the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.run.diagnose import RandomState

__all__: list[str] = []


@contextlib.contextmanager
def in_training_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in training mode inside the context if it is in eval mode; in training mode its parts keep their modes."""
    modes = [] if module.training else [(child, child.training) for child in module.modules()]
    if modes:
        module.train()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and all its parts in eval mode inside the context, and restore their modes."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


class Snapshot:
    """State of the moment before a step, to undo or repeat it."""

    def __init__(self, engine: Engine, *, keep_buffers: bool) -> None:
        self.random_state = RandomState.read(engine.device)
        self._buffers = BufferSnapshot(engine.module) if keep_buffers else None

    def restore_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.restore()
