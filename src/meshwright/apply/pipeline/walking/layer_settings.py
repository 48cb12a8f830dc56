"""Settings of layers: attributes without tensors, and sizes of buffers, that a script may set between forwards.

What a layer returns may depend on them, so that what is known of its calls counts no more; and the copy without values that
runs in the layer's place has to be set alike. Numbers in tensors are no settings here: ranks give each other those of buffers
between steps, and what a layer has computed is put back.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.apply.state.attributes import OF_TORCH, is_object, read_parts
from meshwright.trees import LEAVES

__all__: list[str] = []

_AT_ONCE = LEAVES | {type, types.FunctionType, types.BuiltinFunctionType}
_CONTAINERS = (tuple, list, dict, set)
_DEPTH = 5  # of containers and objects inside each other
_MOST = 256
"""Entries of a container or an object that are compared; long ones are data [count]."""

_Marks = dict[str, Any]
_ABSENT = object()


class LayerSettings:
    """The attributes of layers, and the sizes of their buffers, after the last forward.

    Args:
        module: The model.
        units: Names of its layers.
    """

    def __init__(self, module: nn.Module, units: Iterable[str]) -> None:
        self._children = [
            (unit, name, child)
            for unit in units
            for name, child in module.get_submodule(unit).named_modules()  # by place in the layer, as in its copy
        ]
        self._left: list[_Marks] = []

    def leave(self) -> None:
        """Take what there is now as what the forwards have left behind."""
        self._left = list(self._read())

    def set_since(self, twins: Mapping[str, nn.Module]) -> bool:
        """Tell whether a script has set anything since `leave`, and set it on the layers' copies as well.

        Args:
            twins: Layer's name -> its copy.
        """
        found = False
        for (unit, name, child), old, now in zip(self._children, self._left, self._read(), strict=False):
            if old == now:
                continue
            found = True
            twin = twins.get(unit)
            if twin is not None:
                of_twin = twin.get_submodule(name)
                for key in old.keys() | now.keys():
                    if old.get(key, _ABSENT) != now.get(key, _ABSENT):
                        _set_alike(of_twin, child, key)
        return found

    def _read(self) -> Iterator[_Marks]:
        inside: dict[int, Any] = {}
        unit_is_training = True
        for _, name, child in self._children:
            own = vars(child)
            if not name:
                unit_is_training = child.training
            marks: _Marks = {key: _mark(own[key], inside) for key in own.keys() - OF_TORCH}
            marks["training"] = child.training != unit_is_training  # a layer's own mode is a part of each call
            for key, buffer in child._buffers.items():
                marks[key] = None if buffer is None else buffer.shape
            yield marks


def _mark(value: Any, inside: dict[int, Any]) -> Any:
    """Return what tells a value from another one, without holding any tensor."""
    kind = type(value)
    if kind in _AT_ONCE:
        return kind, value
    if isinstance(value, (Tensor, nn.Module)):
        return None
    if id(value) not in inside:  # a configuration that all layers hold
        inside[id(value)] = list(itertools.islice(_inside(value, _DEPTH), _MOST))
    return inside[id(value)]


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield what a container or an object holds; of what lies too deep, or is of another kind, which object it is."""
    kind = type(value)
    if kind in _AT_ONCE:
        yield value
    elif isinstance(value, (Tensor, nn.Module)):
        yield None
    elif not depth or not (isinstance(value, _CONTAINERS) or is_object(value)):
        yield id(value)
    else:
        parts = value if isinstance(value, _CONTAINERS) else read_parts(value)
        yield len(parts)
        for item in itertools.chain(parts, parts.values()) if isinstance(parts, dict) else parts:
            yield from _inside(item, depth - 1)


def _set_alike(twin: nn.Module, child: nn.Module, key: str) -> None:
    """Give a copy of a module an attribute or buffer of it."""
    own, of_twin = vars(child), vars(twin)
    buffer = child._buffers.get(key)
    if buffer is not None:
        twin._buffers[key] = buffer.detach().clone()
    elif key in own and key != "training" and not _holds_own(own[key]):
        of_twin[key] = own[key]
    elif key not in own and key in of_twin:
        del of_twin[key]


def _holds_own(value: Any) -> bool:
    """Tell whether a value holds tensors or modules: those of the layer are no copy's."""
    if type(value) in _AT_ONCE:
        return False
    parts = value if isinstance(value, tuple) else read_parts(value)
    items = parts.values() if isinstance(parts, dict) else parts
    return isinstance(items, Iterable) and any(isinstance(item, (Tensor, nn.Module)) for item in items)
