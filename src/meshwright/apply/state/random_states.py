"""Random states, and other state of user code, restored after a look at the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

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
