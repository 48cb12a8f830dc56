"""Random states that a look at the model must leave as they were, and whatever else the user's code keeps outside of it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.outside import Outside

__all__: list[str] = []


class PythonState:
    """The states of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")  # whose generator nobody has drawn from where it is not imported
        self.python = random.getstate()
        self.numpy: Any = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Set both back."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def to_bytes(self) -> bytes:
        """Return both as bytes, equal where the states are; of one length."""
        version, words, gauss = self.python
        found = [version, *words, repr(gauss)]
        if self.numpy is not None:
            kind, keys, place, has_gauss, cached = self.numpy
            found += [kind, keys.tolist(), place, has_gauss, repr(cached)]
        return repr(found).encode()


@contextlib.contextmanager
def kept_random_states(
    devices: Iterable[torch.device] = (), *, module: nn.Module | None = None, functions: Sequence[Any] = ()
) -> Iterator[None]:
    """Put back, afterwards, what was drawn inside from the global generators, and what the user's code keeps elsewhere.

    Args:
        devices: Whose generators are kept beside the CPU's.
        module: What runs: its own generators, lists and objects, and what its code keeps outside of it, are put back, too.
        functions: Further code that runs, a loss for example.
    """
    before = PythonState()
    outside = Outside.of(module, functions).take() if module is not None or functions else None
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            before.restore()
            if outside is not None:
                outside.restore()
