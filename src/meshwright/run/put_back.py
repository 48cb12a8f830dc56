"""What a step or a look at the model puts back: modes, buffers, and the random state that a step began with."""

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
    """Have a module train inside where it does not; its parts keep the modes that they have where it does."""
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
    """Have a module and all its parts be in eval mode inside, and in the modes that they had afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


class Snapshot:
    """What must be known of the moment before a step, in case it has to be undone or run again."""

    def __init__(self, engine: Engine, *, keep_buffers: bool) -> None:
        self.random_state = RandomState.read(engine.device)
        self._buffers = BufferSnapshot(engine.module) if keep_buffers else None

    def restore_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.restore()
