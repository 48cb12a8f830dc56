"""Side effects of a forward: changed parameters and buffers, attributes of modules, and its own arguments."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from meshwright.apply.tensor.guards.described import OWN
from meshwright.trees import tensors_in

__all__: list[str] = []

_NUMBERS: Final = (int, float, complex, bool, str)
_MAX_DEPTH: Final = 4
_MAX_ATTRIBUTES: Final = 32
"""Of an object that is no container: a configuration has more, and no forward writes into it [count]."""


@dataclasses.dataclass(kw_only=True)
class Left:
    """Side effects of a forward."""

    tensors: dict[str, Tensor]
    """Every parameter and buffer, by name, and every argument."""
    changed: set[str]
    """Those that were written into, or exchanged for another tensor."""
    attributes: dict[str, Any]
    """Tensors and numbers in attributes of modules that are new or others than before."""


class Before:
    """A module and its arguments before a forward."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._module = module
        self._inputs = inputs
        self._tensors = {name: (tensor, tensor._version) for name, tensor in self._all()}
        self._attributes = {path: (value, _version(value)) for path, value in _attributes_of(module)}

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=False)
        yield from self._module.named_buffers(remove_duplicate=False)
        for index, tensor in enumerate(tensors_in(self._inputs)):
            if not tensor.requires_grad:
                yield f"(argument {index})", tensor

    def left(self) -> Left:
        """Return the differences from before."""
        tensors = dict(self._all())
        changed = set(self._tensors.keys() ^ tensors.keys())
        for name in self._tensors.keys() & tensors.keys():
            tensor, version = self._tensors[name]
            if tensors[name] is not tensor or tensor._version != version:
                changed.add(name)
        attributes = {}
        for path, value in _attributes_of(self._module):
            before, version = self._attributes.get(path, (None, -1))
            is_same = value is before if isinstance(value, Tensor) else type(value) is type(before) and value == before
            if not is_same or version != _version(value):
                attributes[path] = value
        return Left(tensors=tensors, changed=changed, attributes=attributes)


def foreign_parameter(roots: Sequence[Tensor], module: nn.Module) -> nn.Parameter | None:
    """Return a parameter that gets a gradient from these roots and is none of the module's, through a hook that refers to it.

    A backward would leave a gradient on it, which nobody compares.
    """
    own = set(map(id, module.parameters()))
    waiting = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            return leaf
        waiting += [inner for inner, _ in node.next_functions]
    return None


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the tensors and numbers that modules keep beside parameters and buffers."""
    known: set[int] = set()
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in OWN:
                yield from _inside(f"{name}.{key}" if name else key, value, known, 0)


def _inside(path: str, value: Any, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, *_NUMBERS)):
        yield path, value
        return
    if isinstance(value, (nn.Module, type)) or callable(value) or depth > _MAX_DEPTH or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, collections.deque)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        found = getattr(value, "__dict__", {})
        items = [(f"{path}.{key}", item) for key, item in found.items()] if len(found) <= _MAX_ATTRIBUTES else []
    for inner, item in items:
        yield from _inside(inner, item, known, depth + 1)
