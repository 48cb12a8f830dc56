"""Random states, and other state of user code, restored after a look at the model."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright._torch_private import TorchDispatchMode
from meshwright.apply.randomness.sites import in_step
from meshwright.apply.state.hook_tables import ParameterHooks
from meshwright.apply.state.outside import Outside
from meshwright.python_state import kept_python_state

__all__: list[str] = []


@contextlib.contextmanager
def kept_random_states(devices: Iterable[torch.device], *, module: nn.Module) -> Iterator[None]:
    """Restore the global generators, and the state that user code keeps elsewhere, after the context.

    Args:
        devices: Devices whose generators are restored beside the CPU's.
        module: The module that runs; its own generators, lists and objects, hooks of its parameters, and the state that its code
            keeps outside, are restored too.
    """
    outside, gpus = Outside.of(module).take(), [device for device in devices if device.type == "cuda"]
    hooks = ParameterHooks(module)
    with in_step(None), torch.random.fork_rng(gpus), kept_python_state():
        try:
            yield
        finally:
            outside.restore()
            hooks.restore()


_MOST_STEADY = 100
"""Draws of one operator for one shape that are the same [count]: code may draw until it likes what it gets."""


class SteadyDraws(TorchDispatchMode):
    """A context of one forward in which an operator that draws gives the same numbers for a shape, whatever was drawn before it.

    A forward that makes a layer draws its parameters too, and all later numbers of that forward are others. Numbers that are
    drawn ever again for one shape differ from some call on, else a loop that rejects them would not end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            first = next(iter(args), None)
            call = func, first.shape if isinstance(first, torch.Tensor) else str(first)
            self._counts[call] += 1
            seed = max(0, self._counts[call] - _MOST_STEADY)
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
        return func(*args, **(kwargs or {}))
