"""Settling of a model: what its first forward builds once, and later forwards find, is built before the model is cut.

Code of models replaces a layer by another kind when it meets its first batch, or registers hooks and keeps a flag that says so.
Two forwards tell such things from counters and caches: what the first changes, and the second leaves as it is, has settled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.modules.forwards import users_class
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.buffers import BufferSnapshot
from meshwright.apply.state.kept_parameters import KeptParameters
from meshwright.apply.state.random_states import kept_random_states
from meshwright.describe.function_caches import no_cached_tensors

__all__: list[str] = []

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set)
_TABLES = tuple(sorted(name for name in OF_TORCH if name.startswith(("_forward_", "_backward_"))))
_ABSENT: Any = object()


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


def settle(module: nn.Module, run: Callable[[nn.Module], Any], device: torch.device) -> bool:
    """Run a model twice and keep what has settled: children, hooks and plain attributes; restore all else.

    Args:
        module: The model, before a strategy has changed it.
        run: Runs it and its loss on a small batch.
        device: Its device.

    Returns:
        Whether anything was kept.

    Raises:
        Exception: Whatever the model's forward raises.
    """
    state, names = _State(module), _names_of(module)
    parameters, buffers = KeptParameters(module), BufferSnapshot(module)
    seen: list[list[dict[Any, Any]]] = []
    try:
        with no_cached_tensors(module), kept_random_states([device], module=module), torch.no_grad():
            for _ in range(2):
                run(module)
                seen.append(state.read())
                buffers.restore()
    except BaseException:
        state.put(state.then)
        raise
    finally:
        buffers.restore()
        parameters.restore_all()
    state.put(state.merged(*seen))
    if _names_of(module) != names or not state.may_keep():
        state.put(state.then)
        return False
    return state.read() != state.then


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
    is_ours = any(str(getattr(hook, "__module__", "")).startswith("meshwright.") for hook in hooks)
    return is_ours or any(tensor is not None for tensor in tensors) or users_class(type(child)) is not type(child)
