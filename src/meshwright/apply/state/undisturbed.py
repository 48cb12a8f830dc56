"""Trial forwards that leave no trace: random generators, buffers, modes and attributes are restored afterwards."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.apply.state.buffers import BufferSnapshot, buffer_slots
from meshwright.apply.state.random_states import kept_random_states
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.python_state import PythonState

__all__: list[str] = []

_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_TORCHS_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})


class _Apart:
    """Draws of this process from streams that leave the generators as they were."""

    num = 0


def note_draw_apart() -> None:
    """Take note that code has drawn from a stream of its own, after which the generators are put back: between stages' layers."""
    _Apart.num += 1


class GeneratorStates:
    """The state of every generator that a model or its loss may draw from.

    Args:
        device: The device whose generator is recorded, beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = PythonState()
        self._num_apart = _Apart.num

    def have_moved(self) -> bool:
        """Tell whether any of them has drawn a number since, or a stream that stood in its place."""
        if self._num_apart != _Apart.num:
            return True
        if self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state(self._device)):
            return True
        return not torch.equal(self._torch, torch.get_rng_state()) or self._python.has_moved()

    def restore(self) -> None:
        """Restore all of them."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        self._python.restore()


def draw_ahead(device: torch.device, count: int) -> None:
    """Have each of these generators draw numbers, so that what comes next is drawn otherwise.

    Args:
        device: The device whose generator draws, beside the CPU's.
        count: Numbers [count].
    """
    for _ in range(count):
        torch.rand(())
        torch.rand((), device=device)
        random.random()
        np.random.random_sample()


class AttributeSnapshot:
    """The plain attributes of all modules: counters, flags, lists, hooks, and tensors that a forward leaves on a module.

    A list, dict or set is restored with its contents; the contents of other objects are not. Hooks are restored together with
    the flags that announce them: libraries register some in their first forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [(child, _own(child)) for child in module.modules()]
        values = [value for _, own in self._held for value in own.values()]
        self._containers = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
        self._modes = [(child, child.training) for child in module.modules()]

    def restore(self) -> None:
        """Restore every module's attributes and mode."""
        for child, own in self._held:
            for name in vars(child).keys() - own.keys() - _TORCHS_OWN:
                del vars(child)[name]
            vars(child).update(own)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(content)
            else:
                container.extend(content)
        for child, mode in self._modes:
            child.training = mode


def _forget_names(tables: list[tuple[dict[str, Any], set[str]]], known: set[int]) -> None:
    """Remove names that a trial has given to parameters of the model.

    A forward that sets a weight from another one (`self.weight = dropout(self.raw, training=self.training)`) sets the parameter
    itself in eval mode, which torch registers, and which then refuses the tensor of training.
    """
    for table, names in tables:
        for name in dict.keys(table) - names:
            if id(dict.get(table, name)) in known:
                dict.__delitem__(table, name)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def buffer_versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return a value that changes when a forward writes into a buffer or assigns a new one."""
    tensors = [getattr(owner, name) for owner, name in buffer_slots(module)]
    return [(id(tensor), tensor._version) for tensor in tensors]


_trials = 0


def is_trying() -> bool:
    """Tell whether a trial forward is running in this process; for code that counts forwards."""
    return _trials > 0


@contextlib.contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run trial forwards inside the context, without gradients; restore generators, buffers, attributes, modes and flags."""
    global _trials
    with no_cached_tensors(module), kept_random_states([device], module=module), torch.no_grad():
        buffers, attributes = BufferSnapshot(module), AttributeSnapshot(module)
        # Not by the module's own lists: under ZeRO-3 a look into them gathers everything.
        tables = [(child._parameters, dict.keys(child._parameters) | set()) for child in module.modules()]
        frozen = [
            (parameter, parameter.requires_grad)
            for table, _ in tables
            for parameter in dict.values(table)
            if parameter is not None
        ]
        _trials += 1
        try:
            yield
        finally:
            _trials -= 1
            attributes.restore()
            buffers.restore()
            _forget_names(tables, {id(parameter) for parameter, _ in frozen})
            for parameter, is_trained in frozen:
                if parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)
