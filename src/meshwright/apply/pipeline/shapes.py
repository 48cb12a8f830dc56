"""What calls give that this stage does not run: shapes, found by running them without numbers, once for each kind of call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.buffers import buffer_slots
from meshwright.apply.pipeline.values import FAKE_MODE, Meta, describe, make_fake, replace_tensors, value_of
from meshwright.apply.tensor.copies import copy_module
from meshwright.comm._torch_private import FakeTensorError
from meshwright.describe.tree import map_tensors, tensors_in
from meshwright.errors import ApplyError

__all__: list[str] = []

_MOST_KINDS = 4096
"""Kinds of calls that are remembered; batches of ever new lengths must not fill the memory [count]."""


class ReadsValueError(ApplyError):
    """Code between the layers looks at a number that another stage computes."""


class _NeedsNumbersError(Exception):
    """A call cannot be run without numbers."""


class Shapes:
    """Results of calls, without their values.

    A call whose code needs numbers is run for real, on zeros in place of what other stages compute: masks and lengths that come
    of the inputs alone are what they are.

    Args:
        twins: Unit's name -> a copy without values that is run in its place: the unit itself may be cut, and exchange.
    """

    def __init__(self, twins: Mapping[str, nn.Module]) -> None:
        self._twins = twins
        self._known: dict[Any, Any] = {}
        self._needs_numbers: set[str] = set()

    def of_unit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the results of a call of a unit, as fake tensors."""
        twin = self._twins.get(name)
        if twin is not None:
            module, forward = twin.train(module.training), type(twin).forward
        key = (name, module.training, torch.is_grad_enabled(), describe((args, kwargs)))
        if name not in self._needs_numbers:
            try:
                return self._look_up(key, lambda: _run_fake(functools.partial(forward, module), args, kwargs, module))
            except _NeedsNumbersError:
                self._needs_numbers.add(name)
        numbers = _small_integers((args, kwargs))
        if numbers is None:
            return _run_on_zeros(functools.partial(forward, module), args, kwargs, module)
        compute = functools.partial(_run_on_zeros, functools.partial(forward, module), args, kwargs, module)
        return self._look_up((key, numbers), compute)

    def of_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None
    ) -> Any:
        """Return the results of a torch function, as fake tensors; what is no tensor as it is."""
        key = (func, torch.is_grad_enabled(), describe((args, kwargs)))

        def compute() -> Any:
            if func is torch.autograd.grad:
                return _like_inputs(*args, **kwargs)
            try:
                return _run_fake(func, args, kwargs)
            except _NeedsNumbersError as error:
                results = _run_on_zeros(func, args, kwargs)
                if any(True for _ in tensors_in(results)):
                    return results
                raise ReadsValueError(
                    f"the code between the layers calls {getattr(func, '__name__', func)}() on a tensor that stage {home} "
                    f"computes, and every other stage would need its numbers ({error})",
                    fix="decide by the inputs, or inside a layer; or use pp=1",
                ) from error

        return self._look_up(key, compute)

    def _look_up(self, key: Any, compute: Callable[[], Any]) -> Any:
        try:
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            return compute()
        if found is None:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            found = self._known[key] = (replace_tensors(compute(), _Described),)
        return _restore(found[0])


def make_twins(module: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """Return a copy of each unit whose parameters are zeros without memory."""

    def empty(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.clone()
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    twin = copy_module(module, empty)
    return {name: twin.get_submodule(name) for name in units}


class _Described:
    """A tensor's description, in place of it."""

    __slots__ = ("meta",)

    def __init__(self, tensor: Tensor) -> None:
        self.meta = Meta.of(tensor)


def _restore(tree: Any) -> Any:
    if isinstance(tree, _Described):
        return make_fake(tree.meta)
    if isinstance(tree, dict):
        values = {key: _restore(item) for key, item in tree.items()}
        return values if type(tree) is dict else type(tree)(**values)
    if isinstance(tree, (list, tuple)):
        items = [_restore(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: _restore(getattr(tree, field.name)) for field in dataclasses.fields(tree) if field.init}
        return dataclasses.replace(tree, **fields)
    return tree


@contextlib.contextmanager
def _leaving_buffers(module: nn.Module | None) -> Iterator[None]:
    """Have a module run on copies of its buffers: running statistics count their batches, fake or not.

    Not even written back: a backward of the same rank's own may still need them untouched.
    """
    slots = [] if module is None else [(owner, name, getattr(owner, name)) for owner, name in buffer_slots(module)]
    for owner, name, tensor in slots:
        owner._buffers[name] = tensor.clone()
    try:
        yield
    finally:
        for owner, name, tensor in slots:
            owner._buffers[name] = tensor


def _run_fake(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
) -> Any:
    def stand_in(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is None:
            return tensor
        if value.fake is None:
            value.fake = make_fake(Meta.of(value.any))
        return value.fake

    args, kwargs = replace_tensors((args, kwargs), stand_in)
    try:
        with _leaving_buffers(module), FAKE_MODE:
            return func(*args, **kwargs)
    except FakeTensorError as error:
        raise _NeedsNumbersError(type(error).__name__) from error
    except RuntimeError as error:
        if "data is not allocated" in str(error):  # C++ code that reads a tensor's numbers
            raise _NeedsNumbersError("data is not allocated") from error
        raise


def _like_inputs(_outputs: Any, inputs: Any, *_: Any, create_graph: bool = False, **__: Any) -> tuple[Tensor, ...]:
    """Return what torch.autograd.grad does: a gradient for each input."""
    found = []
    for tensor in tensors_in(inputs):
        meta = Meta.of(tensor if (value := value_of(tensor)) is None else value.any)
        found.append(make_fake(dataclasses.replace(meta, requires_grad=create_graph)))
    return tuple(found)


_SMALL = 4096
"""Integers that are compared to tell whether two calls are alike [count]."""


def _small_integers(tree: Any) -> tuple[Any, ...] | None:
    """Return the numbers in the integer tensors that every stage has: lengths, offsets; None where they are too many."""
    own = [tensor for tensor in tensors_in(tree) if value_of(tensor) is None]
    exact = [tensor for tensor in own if not tensor.is_floating_point() and not tensor.is_complex()]
    if sum(tensor.numel() for tensor in exact) > _SMALL:
        return None
    return tuple(str(tensor.tolist()) for tensor in exact)


def _run_on_zeros(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
) -> Any:
    def stand_in(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is None:
            return tensor
        known = value.any
        zeros = torch.zeros(tuple(known.shape), dtype=known.dtype, device=known.device)
        return zeros.requires_grad_() if known.requires_grad else zeros

    args, kwargs = replace_tensors((args, kwargs), stand_in)
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with _leaving_buffers(module), torch.random.fork_rng(devices):
        outputs = func(*args, **kwargs)
    return map_tensors(outputs, lambda tensor: make_fake(Meta.of(tensor)))
