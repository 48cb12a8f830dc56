"""Parameters of a module: their names, sizes and layers, and what kinds of modules use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from meshwright.describe.layers import find_layers

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ownership:
    """Parameters of a module, by their first names."""

    names: Mapping[str, tuple[str, ...]]
    """All names."""
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: Mapping[str, int]
    homes: Mapping[str, tuple[str, ...]]
    """The layers that hold it; none for a parameter of a container."""
    simple: frozenset[str]
    """Modules without modules inside, whose forward is code of their own alone; `nn.MultiheadAttention` counts as one."""
    recurrent: frozenset[str]
    """Modules of torch that run a cell along a sequence."""
    chains: frozenset[str]
    """Modules that hand on from one module inside to the next, and do nothing else."""
    buffered: frozenset[str]
    """Layers that have buffers."""

    def numel(self, name: str) -> int:
        """Return a parameter's elements [count]."""
        total = 1
        for size in self.shapes[name]:
            total *= size
        return total


def layer_names(module: nn.Module) -> list[str]:
    """Return the names of a module's layers, each module once."""
    first: dict[int, str] = {}
    for name, layer in find_layers(module):
        first.setdefault(id(layer), name)
    return list(first.values())


def ownership_of(module: nn.Module, layers: Sequence[str]) -> Ownership:
    """Return who holds which parameter."""
    by_id: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    known = set(layers)

    def home(name: str) -> str | None:
        parts = name.split(".")
        paths = (".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1))
        return next((path for path in paths if path in known), None)

    homes = {}
    for names in by_id.values():
        found = dict.fromkeys(place for name in names if (place := home(name)) is not None)
        homes[names[0]] = tuple(found)
    return Ownership(
        names={names[0]: tuple(names) for names in by_id.values()},
        shapes={names[0]: tuple(tensors[key].shape) for key, names in by_id.items()},
        nbytes={names[0]: tensors[key].nbytes for key, names in by_id.items()},
        homes=homes,
        simple=_names_of(
            module, lambda one: isinstance(one, nn.MultiheadAttention) or not any(True for _ in one.children())
        ),
        recurrent=_names_of(module, lambda one: isinstance(one, (nn.RNNBase, nn.RNNCellBase))),
        chains=_names_of(module, lambda one: type(one) is nn.Sequential),
        buffered=frozenset(name for name in layers if any(True for _ in module.get_submodule(name).buffers())),
    )


def _names_of(module: nn.Module, has_it: Callable[[nn.Module], bool]) -> frozenset[str]:
    return frozenset(name for name, child in module.named_modules() if has_it(child))
