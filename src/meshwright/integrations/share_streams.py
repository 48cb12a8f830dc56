"""Random numbers of ranks that run one process' loop: alike for data, apart for each share of a batch in its forward.

One process draws data and dropout from the same generators. Here ranks draw data alike, so that they see the same batches, and
what a forward draws belongs to the seed, the number of the forward and the share. A resumed run draws what an uninterrupted one
would, without a file for each rank. Under tp alone it is so too: a cut layer moves the generator that one process shuffles with.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from meshwright.python_state import kept_python_state

__all__: list[str] = []


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Return a context after which all generators are as before: Python's, NumPy's, torch's, and those of a GPU."""
    with kept_python_state(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def of_share(device: torch.device, *, seed: int, forward: int, share: int) -> Iterator[None]:
    """Return the context of a forward and its backward.

    Args:
        device: This rank's device.
        seed: The run's seed.
        forward: Number of the forward in the run [count].
        share: Number of the share of the batch; ranks that have the same share draw alike.
    """
    with kept(device):
        mixed = (seed * 1_000_003 + forward * 8_191 + share) % 2**32
        random.seed(mixed)
        np.random.seed(mixed)
        torch.manual_seed(mixed)
        yield
