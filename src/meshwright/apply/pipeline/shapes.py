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
from meshwright.apply.pipeline.values import FAKE_MODE, Meta, StandIn, describe, make_fake, replace_tensors, value_of
from meshwright.apply.tensor.copies import copy_module
from meshwright.comm._torch_private import FakeTensorError
from meshwright.describe.tree import tensors_in
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
        self._known: dict[Any, Known] = {}
        self._needs_numbers: set[str] = set()

    def of_unit(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """Return what is known of such a call of a unit, without running anything."""
        return self._look_up(self._key(name, module, args, kwargs))

    def find_of_unit(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Known:
        """Run a call of a unit on tensors without values, or on zeros where its code needs numbers, and remember what it gave."""
        is_training = module.training
        twin = self._twins.get(name)
        if twin is not None:
            module, forward = twin.train(is_training), type(twin).forward
        run = functools.partial(forward, module)
        if name not in self._needs_numbers:
            try:
                found = _run_fake(run, args, kwargs, module)
            except _NeedsNumbersError:
                self._needs_numbers.add(name)
            else:
                return self._remember(self._key(name, module, args, kwargs), found)
        return self._remember(self._key(name, module, args, kwargs), _run_on_zeros(run, args, kwargs, module))

    def _key(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (name, module.training, torch.is_grad_enabled(), describe(args), describe(kwargs))
        if name not in self._needs_numbers:
            return key
        numbers = _small_integers((args, kwargs))
        return None if numbers is None else (key, numbers)

    def of_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None
    ) -> Known:
        """Return the results of a torch function."""
        key = (func, torch.is_grad_enabled(), describe(args), describe(kwargs))
        known = self._look_up(key)
        return known if known is not None else self._remember(key, _find_of_function(func, args, kwargs, home))

    def _look_up(self, key: Any) -> Known | None:
        try:
            return self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            return None

    def _remember(self, key: Any, results: Any) -> Known:
        known = Known(replace_tensors(results, Meta.of))
        if key is not None:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            with contextlib.suppress(TypeError):
                self._known[key] = known
        return known


class Known:
    """Results of a call, with a description in place of each tensor."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def make(self, tensor_of: Callable[[Meta], Tensor]) -> Any:
        """Return the results with tensors made of their descriptions, in containers of their own."""
        return _with_tensors(self._tree, tensor_of)


def _with_tensors(tree: Any, tensor_of: Callable[[Meta], Tensor]) -> Any:
    if isinstance(tree, Meta):
        return tensor_of(tree)
    if isinstance(tree, dict):
        values = {key: _with_tensors(item, tensor_of) for key, item in tree.items()}
        return values if type(tree) is dict else type(tree)(**values)
    if isinstance(tree, (list, tuple)):
        items = [_with_tensors(item, tensor_of) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: _with_tensors(getattr(tree, name), tensor_of) for name in names})
    return tree


def _find_of_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None) -> Any:
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


def make_twins(module: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """Return a copy of each unit whose parameters are zeros without memory."""

    def empty(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.clone()
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    twin = copy_module(module, empty)
    return {name: twin.get_submodule(name) for name in units}


@contextlib.contextmanager
def _runnable(module: nn.Module | None, make: Callable[[Meta], Tensor]) -> Iterator[None]:
    """Have a module run on copies of its buffers, and on something made for each stand-in that it keeps.

    Running statistics count their batches, fake or not. They are not even written back: a backward of the same rank's own may
    still need them untouched. A hook may have computed a weight (weight_norm) of parameters that are not here.
    """
    if module is None:
        yield
        return
    buffers = [(owner, name, getattr(owner, name)) for owner, name in buffer_slots(module)]
    kept = [
        (vars(owner), name, value)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, StandIn)
    ]
    for owner, name, tensor in buffers:
        owner._buffers[name] = tensor.clone()
    for attributes, name, value in kept:
        attributes[name] = make(Meta.of(value))
    try:
        yield
    finally:
        for owner, name, tensor in buffers:
            owner._buffers[name] = tensor
        for attributes, name, value in kept:
            attributes[name] = value


def _with_stand_ins(tree: Any, make: Callable[[Meta], Tensor]) -> Any:
    """Replace the tensors that some stage computes."""

    def stand_in(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        return tensor if value is None else make(Meta.of(value.any))

    return replace_tensors(tree, stand_in)


def _run_fake(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
) -> Any:
    args, kwargs = _with_stand_ins((args, kwargs), make_fake)
    try:
        with _runnable(module, make_fake), FAKE_MODE:
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


def _zeros(meta: Meta) -> Tensor:
    zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    return zeros.requires_grad_() if meta.requires_grad else zeros


def _run_on_zeros(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
) -> Any:
    args, kwargs = _with_stand_ins((args, kwargs), _zeros)
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with _runnable(module, _zeros), torch.random.fork_rng(devices):
        return func(*args, **kwargs)
