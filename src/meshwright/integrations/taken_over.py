"""Models that a later Trainer takes from an earlier one, as transformers lets it: whole again, before the later one reads them.

Scripts train a model in two phases by two Trainers, the first of which they keep. Every rank makes both, so the model is
made whole together. The earlier one may still evaluate and save; it has no plan, and trains no more.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = []


class Holder(Protocol):
    """A Trainer, as the one after it sees it."""

    parallel: ParallelModel | None

    def give_up(self) -> None:
        """Forget the plan: the model is whole, and another Trainer's."""
        ...


_HOLDERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


_OVER: weakref.WeakSet[Any] = weakref.WeakSet()


def hold(module: nn.Module, holder: Holder) -> None:
    """Note which Trainer has a module under its plan.

    Raises:
        ConfigError: A later one has taken it.
    """
    if holder in _OVER:
        raise ConfigError(
            "this Trainer's model is a later Trainer's now, and its optimizer has no parameters any more",
            fix="train by the later one, or make a new Trainer of the model",
        )
    _HOLDERS[module] = weakref.ref(holder)


def take(module: nn.Module, taker: Holder) -> None:
    """Make a module whole that an earlier Trainer has under its plan; every rank calls it."""
    held = _HOLDERS.get(module)
    earlier: Holder | None = None if held is None else held()
    if earlier is None or earlier is taker or earlier.parallel is None:
        return
    make_whole(earlier.parallel)
    earlier.give_up()
    _OVER.add(earlier)
    del _HOLDERS[module]


def make_whole(parallel: ParallelModel) -> None:
    """Close a model, and leave its module with its whole values; every rank calls it."""
    values = parallel.full_state_dict()
    module = parallel.module
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    devices = {name: tensor.device for name, tensor in tensors}
    parallel.close()
    for name, tensor in tensors:
        value = values.get(name)
        if isinstance(value, torch.Tensor):
            tensor.data = value.to(devices[name], tensor.dtype)
            tensor.grad = None
