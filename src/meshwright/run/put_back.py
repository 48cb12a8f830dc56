"""Modes, buffers and random states of a step or a look at the model, set for it and restored after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.modules.modes import modes_of, put_back, set_flags, sets_parameters
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.run.diagnose import RandomState
from meshwright.trees import map_tensors

__all__: list[str] = []


@contextlib.contextmanager
def in_training_mode(engine: Engine) -> Iterator[None]:
    """Put the model in training mode inside the context if it is in eval mode; in training mode its parts keep their modes."""
    with contextlib.nullcontext() if engine.module.training else _in_mode(engine, True):
        yield


@contextlib.contextmanager
def in_eval_mode(engine: Engine) -> Iterator[None]:
    """Put the model and all its parts in eval mode inside the context, and restore their modes. Every rank enters it."""
    with _in_mode(engine, False):
        yield


@contextlib.contextmanager
def _in_mode(engine: Engine, mode: bool) -> Iterator[None]:
    before = modes_of(engine.module)
    set_mode(engine, mode)
    try:
        yield
    except BaseException:
        set_flags(before)  # other ranks may not come to put parameters together
        raise
    with _whole_for_modes(engine):
        put_back(before)


def set_mode(engine: Engine, mode: bool) -> None:
    """Call the model's `train`, which sets its parameters, as a merge of adapters does, while they are whole.

    Args:
        engine: The strategy; every rank calls it.
        mode: Whether training.
    """
    with _whole_for_modes(engine):
        engine.module.train(mode) if mode else engine.module.eval()


@contextlib.contextmanager
def _whole_for_modes(engine: Engine) -> Iterator[None]:
    if not sets_parameters(engine.module):
        yield
        return
    with engine.whole_parameters(), engine.switch.whole():
        yield


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
