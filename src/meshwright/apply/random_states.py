"""Random states that a look at the model must leave as they were: torch's, Python's and NumPy's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator

import torch

__all__: list[str] = []


@contextlib.contextmanager
def kept_random_states(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Put back, afterwards, what was drawn inside from the global generators.

    Args:
        devices: Whose generators are kept beside the CPU's.
    """
    numpy = sys.modules.get("numpy")  # whose generator nobody has drawn from where it is not imported
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None and arrays is not None:
                numpy.random.set_state(arrays)
