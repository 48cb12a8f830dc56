"""Settling of a model: what its first forward builds once, and later forwards find, is built before the model is cut.

Code of models replaces a layer by another kind when it meets its first batch, or registers hooks and keeps a flag that says so.
Two forwards tell such things from counters and caches: what the first changes, and the second leaves as it is, has settled.

A flag may announce what is not kept: a buffer, a number of the batch, a variable elsewhere. Or it may say that the first forward
is over, which then never comes. So two forwards of the settled model have to give what the first two gave; else nothing is kept.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.modules.forwards import users_class
from meshwright.apply.modules.modes import set_eval_flags
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.hook_tables import ParameterHooks, is_ours
from meshwright.apply.state.kept_parameters import KeptParameters
from meshwright.apply.state.random_states import SteadyDraws, kept_random_states
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set)
_TABLES = tuple(sorted(name for name in OF_TORCH if name.startswith(("_forward_", "_backward_"))))
_ABSENT: Any = object()


def made_parameter_error(name: str, lack: str) -> ApplyError:
    """Return the refusal of a parameter that the model's first forward has made.

    Args:
        name: Its FQN.
        lack: What does not have it.
    """
    return ApplyError(
        f"the model's first forward makes the parameter '{name}', which was not there when the plan was applied: {lack}",
        fix="make it in the model's constructor, or run the model once before apply_plan",
    )


class Children:
    """The children of all modules of a model at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(child._modules, dict(child._modules)) for child in module.modules()]

    def have_changed(self) -> bool:
        """Tell whether a module has other children now, or in another order."""
        return any(list(now.items()) != list(then.items()) for now, then in self._held)

    def restore(self) -> None:
        """Give all modules the children that they had."""
        for now, then in self._held:
            if list(now.items()) != list(then.items()):
                now.clear()
                now.update(then)


@dataclasses.dataclass(frozen=True)
class Settled:
    """What was kept of a model's first forward."""

    digest: str
    """Equal on ranks that have kept the same modules and plain values in the same places."""
    undo: Callable[[], None]
    """Makes the model as it was before."""


def settle(
    module: nn.Module, run: Callable[[nn.Module], Any], device: torch.device, *, in_eval_mode_too: bool = False
) -> Settled | None:
    """Run a model four times and keep what has settled: children, hooks and plain attributes; restore all else.

    Args:
        module: The model, before a strategy has changed it.
        run: Runs it and its loss on a micro-batch, and returns its outputs.
        device: Its device.
        in_eval_mode_too: Whether the same has to settle in eval mode, since one process would begin with an evaluation.

    Returns:
        What was kept; None where nothing has settled, or the settled model does not compute what the first forwards have.

    Raises:
        Exception: Whatever the model's forward raises.
    """
    state, names = _State(module), _names_of(module)
    try:
        outputs, seen, is_still = _run_twice(module, run, device, state)
        state.put(kept := state.merged(*seen))
        if _names_of(module) == names and state.may_keep() and is_still and state.read() != state.then:
            again, _, _ = _run_twice(module, run, device, state)
            is_right = _are_alike(outputs, again)
            if is_right and in_eval_mode_too:
                is_right = _are_equal(kept, _settled_in_eval_mode(module, run, device, state))
            if is_right:
                state.put(kept)
                return Settled(state.digest(), lambda: state.put(state.then))
    except BaseException:
        state.put(state.then)
        raise
    state.put(state.then)
    return None


def _run_twice(
    module: nn.Module, run: Callable[[nn.Module], Any], device: torch.device, state: _State
) -> tuple[list[list[Tensor]], list[list[dict[Any, Any]]], bool]:
    """Return the outputs and the states of two forwards, and whether all else stayed: what modules that the first made hold, and
    hooks of parameters.

    Buffers, parameters, generators and what code keeps elsewhere are restored after both; the state is not.
    """
    parameters, buffers, before = KeptParameters(module), BufferSnapshot(module), {*module.modules()}
    outputs: list[list[Tensor]] = []
    seen: list[list[dict[Any, Any]]] = []
    made: list[list[dict[Any, Any]]] = []
    hooks = ParameterHooks(module)
    is_still = True
    try:
        with no_cached_tensors(module), kept_random_states([device], module=module), torch.no_grad():
            for _ in range(2):
                with SteadyDraws():
                    outputs.append([tensor.detach().clone() for tensor in tensors_in(run(module))])
                seen.append(state.read())
                made.append([dict(vars(child)) for child in module.modules() if child not in before])
            is_still = not hooks.have_changed()
    finally:
        buffers.restore()
        parameters.restore_all()
    is_still = is_still and all(
        one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
        for one, other in zip(*made, strict=False)
    )
    return outputs, seen, is_still


def _settled_in_eval_mode(
    module: nn.Module, run: Callable[[nn.Module], Any], device: torch.device, state: _State
) -> list[dict[Any, Any]]:
    """Return what would settle if the first forwards ran in eval mode, from the state before."""
    modes = [(child, child.training) for child in module.modules()]
    state.put(state.then)
    set_eval_flags(module)
    try:
        _, seen, _ = _run_twice(module, run, device, state)
    finally:
        for child, mode in modes:
            child.training = mode
    return state.merged(*seen)


def _are_equal(one: list[dict[Any, Any]], other: list[dict[Any, Any]]) -> bool:
    """Tell whether two states have the same entries, but for the mode; what was made twice is known by its text."""

    def are_alike(a: Any, b: Any) -> bool:
        is_made = callable(a) and callable(b) and not isinstance(a, Tensor)
        return _are_same(a, b) or (is_made and _text_of(a) == _text_of(b))

    return all(
        own.keys() == theirs.keys() and all(key == "training" or are_alike(own[key], theirs[key]) for key in own)
        for own, theirs in zip(one, other, strict=True)
    )


def _are_alike(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Tell whether two pairs of forwards gave the same, but for roundings."""
    if [len(found) for found in one] != [len(found) for found in other]:
        return False
    pairs = ((a, b) for found, again in zip(one, other, strict=True) for a, b in zip(found, again, strict=True))
    return all(_is_close(a, b) for a, b in pairs)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    largest = float(one.abs().max()) if one.numel() else 0.0
    rounding = math.sqrt(torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _names_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return the FQN and the identity of each parameter and buffer."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return sorted((name, id(tensor)) for name, tensor in tensors)


class _State:
    """Attributes, children and hooks of the modules that a model has now, each a dict."""

    def __init__(self, module: nn.Module) -> None:
        children = list(module.modules())
        self._attributes = [vars(child) for child in children]
        self._children = [child._modules for child in children]
        self._hooks = [table for child in children for name in _TABLES if (table := vars(child).get(name)) is not None]
        self._containers = [
            (value, value.copy())
            for own in self._attributes
            for name, value in own.items()
            if name not in OF_TORCH and type(value) in _CONTAINERS
        ]
        self.then = self.read()

    def _places(self) -> Iterator[dict[Any, Any]]:
        yield from self._attributes
        yield from self._children
        yield from self._hooks

    def read(self) -> list[dict[Any, Any]]:
        """Return the present entries of each."""
        own = [{key: v for key, v in held.items() if key not in OF_TORCH} for held in self._attributes]
        return [*own, *map(dict, self._children), *map(dict, self._hooks)]

    def put(self, entries: list[dict[Any, Any]]) -> None:
        """Set the entries of each, and the contents of containers that were there before."""
        for index, (held, wanted) in enumerate(zip(self._places(), entries, strict=True)):
            keep = OF_TORCH if index < len(self._attributes) else frozenset[str]()
            if [(k, id(v)) for k, v in held.items() if k not in keep] != [(k, id(v)) for k, v in wanted.items()]:
                of_torch = {key: value for key, value in held.items() if key in keep}
                held.clear()
                held.update(of_torch)
                held.update(wanted)
        for value, content in self._containers:
            if _ids_in(value) != _ids_in(content):
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)

    def merged(self, first: list[dict[Any, Any]], second: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
        """Return what has settled over what was there before."""
        return [_settled(*three) for three in zip(self.then, first, second, strict=True)]

    def digest(self) -> str:
        """Return a digest of what differs from before: places, and plain values, classes of modules and names of functions."""
        num_named = len(self._attributes) + len(self._children)  # the keys of hooks are numbers of this process
        changes = [
            (place, str(key) if place < num_named else "", _text_of(now.get(key, _ABSENT)))
            for place, (then, now) in enumerate(zip(self.then, self.read(), strict=True))
            for key in dict.fromkeys((*then, *now))
            if not _are_same(then.get(key, _ABSENT), now.get(key, _ABSENT))
        ]
        return hashlib.sha256(repr(changes).encode()).hexdigest()

    def may_keep(self) -> bool:
        """Tell whether all children that are others now are shells: neither they nor those before hold tensors or our hooks."""
        start = len(self._attributes)
        pairs = zip(self.then[start : start + len(self._children)], self._children, strict=True)
        return not any(
            then.get(key) is not now.get(key) and (_is_held(then.get(key)) or _is_held(now.get(key)))
            for then, now in pairs
            for key in then.keys() | now.keys()
        )


def _settled(before: dict[Any, Any], first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries before, with those of the second forward that the first has changed and the second has not."""
    found: dict[Any, Any] = {}
    for key in dict.fromkeys((*before, *second)):
        then, once, twice = (entries.get(key, _ABSENT) for entries in (before, first, second))
        has_settled = not _are_same(then, once) and _are_same(once, twice) and _is_plain(twice)
        value = twice if has_settled else then
        if value is not _ABSENT:
            found[key] = value
    return found


def _ids_in(value: Any) -> list[Any]:
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else [id(item) for item in value]


def _are_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _is_plain(value: Any) -> bool:
    return (
        value is _ABSENT
        or isinstance(value, (*_PLAIN, nn.Module))
        or (callable(value) and not isinstance(value, Tensor))
    )


def _is_held(child: nn.Module | None) -> bool:
    """Tell whether a module holds tensors of its own, or anything of ours: then another one cannot take its place."""
    if child is None:
        return False
    tensors = [*child._parameters.values(), *child._buffers.values()]
    hooks = [hook for name in _TABLES for hook in (vars(child).get(name) or {}).values() if callable(hook)]
    return (
        any(map(is_ours, hooks))
        or any(tensor is not None for tensor in tensors)
        or users_class(type(child)) is not type(child)
    )


def _text_of(value: Any) -> str:
    if isinstance(value, nn.Module):
        own = [(key, repr(v)) for key, v in vars(value).items() if key not in OF_TORCH and isinstance(v, _PLAIN)]
        return f"{type(value).__module__}.{type(value).__qualname__} {own}"
    if value is _ABSENT or isinstance(value, _PLAIN):
        return "" if value is _ABSENT else repr(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
