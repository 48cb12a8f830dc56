"""Random states, and other state of user code, restored after a look at the model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.apply.randomness.sites import in_step
from meshwright.apply.state.outside import Outside

__all__: list[str] = []


class PythonState:
    """The states of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Restore both."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def has_moved(self) -> bool:
        """Tell whether either has drawn since."""
        now: Any = np.random.get_state()
        is_same = now[2:] == self.numpy[2:] and np.array_equal(now[1], self.numpy[1])
        return not is_same or random.getstate() != self.python

    @property
    def places(self) -> tuple[int, int]:
        """Positions of both in their blocks of numbers."""
        return self.python[1][-1], self.numpy[2]

    def to_json(self) -> list[Any]:
        """Return both as JSON values, equal where the states are."""
        version, words, gauss = self.python
        kind, keys, *rest = self.numpy
        return [[version, list(words), gauss], [kind, keys.tolist(), *rest]]

    @classmethod
    def from_json(cls, value: list[Any]) -> PythonState:
        """Return what `to_json` gave."""
        state = cls()
        (version, words, gauss), (kind, keys, *rest) = value
        state.python = (version, tuple(words), gauss)
        state.numpy = (kind, np.array(keys, dtype="uint32"), *rest)
        return state


@contextlib.contextmanager
def kept_random_states(devices: Iterable[torch.device], *, module: nn.Module) -> Iterator[None]:
    """Restore the global generators, and the state that user code keeps elsewhere, after the context.

    Args:
        devices: Devices whose generators are restored beside the CPU's.
        module: The module that runs; its own generators, lists and objects, and the state that its code keeps outside, are
            restored too.
    """
    before, outside = PythonState(), Outside.of(module).take()
    with in_step(None), torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            before.restore()
            outside.restore()
