"""State of another stage's layer while its call is run here for its shapes: given what it needs, and put back after it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from meshwright.apply.pipeline.walking.stand_ins import Meta
from meshwright.apply.pipeline.walking.without_numbers import NeedsNumbersError, zeros_like_meta
from meshwright.apply.state.buffers import buffer_slots

__all__: list[str] = []


@contextlib.contextmanager
def own_buffers(module: nn.Module) -> Iterator[None]:
    """Run a module on copies of its buffers inside the context.

    Running statistics count their batches even on fake tensors. The buffers are not written and restored either: a backward on
    this rank may still need them untouched.
    """
    buffers = [(owner, name, getattr(owner, name)) for owner, name in buffer_slots(module)]
    for owner, name, tensor in buffers:
        owner._buffers[name] = tensor.clone()
    try:
        yield
    finally:
        for owner, name, tensor in buffers:
            owner._buffers[name] = tensor


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module, each once, with those of other stages, which `Holding` keeps among attributes."""
    own = itertools.chain.from_iterable(vars(child).values() for child in module.modules())
    found = (value for value in (*own, *module.parameters()) if isinstance(value, nn.Parameter))
    return list({id(value): value for value in found}.values())


@contextlib.contextmanager
def put_back(module: nn.Module, *, is_fake: bool) -> Iterator[None]:
    """Put parameters back that the code inside assigns to (`self.weight.data = self.weight.data.clamp(0)`).

    Raises:
        NeedsNumbersError: It was given fake tensors, which no parameter can be.
    """
    held = [(parameter, parameter.data) for parameter in _parameters_of(module)]
    try:
        yield
    finally:
        moved = [(p, data) for p, data in held if p.device != data.device or p.data_ptr() != data.data_ptr()]
        for parameter, data in moved:
            parameter.data = data
        if moved and is_fake:
            raise NeedsNumbersError


@contextlib.contextmanager
def laid_out(module: nn.Module, make: Callable[[Meta], Tensor]) -> Iterator[None]:
    """Give absent parameters, one number for all entries, real memory inside the context: some kernels require it.

    Where zeros do not serve, `make` says what is in it.
    """
    keeps = make is zeros_like_meta
    parameters = _parameters_of(module)
    absent = [
        (parameter, parameter.data)
        for parameter in parameters
        if not any(parameter.stride()) and (parameter.dim() or not keeps)
    ]
    for parameter, data in absent:
        parameter.data = data.contiguous() if keeps else make(Meta.of(data))
    try:
        yield
    finally:
        for parameter, data in absent:
            parameter.data = data


@contextlib.contextmanager
def absent_listed(module: nn.Module) -> Iterator[None]:
    """List the parameters of other stages inside the context, as on theirs: code asks the first one for its dtype or device."""
    owners = [(child, child._parameters) for child in module.modules()]
    for child, own in owners:
        absent = {name: value for name, value in vars(child).items() if isinstance(value, nn.Parameter)}
        if absent:
            vars(child)["_parameters"] = {**absent, **own}
    try:
        yield
    finally:
        for child, own in owners:
            vars(child)["_parameters"] = own
