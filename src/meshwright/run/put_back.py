"""Modes, buffers and random states of a step or a look at the model, set for it and restored after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.run.diagnose import RandomState
from meshwright.trees import map_tensors

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


@contextlib.contextmanager
def with_versions() -> Iterator[None]:
    """Leave `torch.inference_mode` inside the context, without gradients: its tensors have no versions, which show writes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def versioned(tree: Any) -> Any:
    """Return arguments in which tensors of inference mode are copies that have versions."""
    return map_tensors(tree, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


class Snapshot:
    """State of the moment before a step, to undo or repeat it."""

    def __init__(self, engine: Engine, *, keep_buffers: bool) -> None:
        self.random_state = RandomState.read(engine.device)
        self._buffers = BufferSnapshot(engine.module) if keep_buffers else None

    def restore_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.restore()
