"""State that code keeps outside parameters and buffers: global variables, closures, class attributes, objects, generators.

A trial forward must leave all of it unchanged. What code can reach is read off its functions: the names of their module that they
use, the cells of their closures, and the contents of both. Libraries are not searched.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.state.attributes import OF_TORCH, may_change, read_parts, write_parts
from meshwright.apply.state.copied_iterators import COPIED_ITERATORS, copied
from meshwright.apply.state.generators import draws_globally, is_generator, read_generator
from meshwright.apply.state.libraries import Home
from meshwright.apply.state.slots import read_slots
from meshwright.trees import write_back

__all__: list[str] = []

_NUMBERS = frozenset({int, float, bool, str, complex})
_MAX_FUNCTIONS = 3000
"""Functions that are followed; more are those of a library that is not known by name [count]."""
_DEPTH = 4  # depth of nested containers and objects
_MAX_ENTRIES = 10_000
"""Of a container that is copied; a larger one is data, not state [count]."""
_MAX_BYTES = 2**22
"""Of a tensor that is copied whether or not it is written to [bytes]."""


class _OfClass:
    """A class's attributes as a writable mapping."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __contains__(self, name: str) -> bool:
        return name in vars(self._kind)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)


class _OfCell:
    """A closure's variable as a mapping of one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            raise KeyError from None

    def __contains__(self, _: str) -> bool:
        return self._cell != types.CellType()  # as an empty one is

    def __setitem__(self, _: str, value: Any) -> None:
        self._cell.cell_contents = value


class Outside:
    """State that the code of a module, and of further functions, keeps outside the module's parameters and buffers."""

    def __init__(self, module: nn.Module | None, functions: Sequence[Any] = ()) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._slots: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._seen: set[int] = set()
        self._values: list[Any] = []
        self._functions: list[Any] = []  # kept alive, so that no other object gets a seen id
        self._others: list[nn.Module] = []
        self.home = Home(module, functions)
        """Which packages are the model's own."""
        self._imported: set[tuple[int, frozenset[str]]] = set()
        self._own = set(map(id, () if module is None else module.modules()))
        self.draws = False
        """Whether any of the code may draw from Python's or NumPy's global generator."""
        for child in () if module is None else module.modules():
            self._look_at_module(child)
        for function in functions:
            self._look_at_callable(function)

    @classmethod
    def of(cls, module: nn.Module) -> Outside:
        """Return the record of a module, which is cached."""
        found = _KNOWN.get(module)
        if found is None or found[0] != _kinds(module):
            found = _KNOWN[module] = (_kinds(module), cls(module))
        return found[1]

    # -- what code reaches ------------------------------------------------------------------------------------------

    def _look_at_module(self, module: nn.Module) -> None:
        self._look_at_class(type(module))
        for value in vars(module).values():
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self._look_at_callable(value)
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        for hook in [hook for found in hooks for hook in found.values()]:
            self._look_at_callable(hook)

    def _look_at_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or base.__module__.partition(".")[0] in ("torch", "builtins", "meshwright"):
                continue
            self._seen.add(id(base))
            names: set[str] = set()
            for value in list(vars(base).values()):
                inner = [value.fget, value.fset] if isinstance(value, property) else [value]
                for function in [getattr(item, "__func__", item) for item in inner]:
                    if isinstance(function, types.FunctionType):
                        names |= names_of(function.__code__)
                        self._look_at_callable(function)
            if not self.home.is_foreign(base.__module__):
                attributes = _OfClass(base)
                for name in names & vars(base).keys():
                    if not isinstance(vars(base)[name], (types.FunctionType, property, classmethod, staticmethod)):
                        self._slot(attributes, name, f"{base.__name__}.{name}", base)

    def _look_at_callable(self, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MAX_FUNCTIONS:
            return
        if isinstance(value, functools.partial):
            self._seen.add(id(value))
            self._functions.append(value)
            items = (value.func, *value.args, *value.keywords.values())
            self._values += [item for item in items if not callable(item)]
            for item in filter(callable, items):
                self._look_at_callable(item)
        elif isinstance(value, types.MethodType):
            self._look_at_callable(value.__func__)
            self._look_at_object(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif draws_globally(value):
            self.draws = True
        elif isinstance(value, type):
            if not self.home.is_foreign(value.__module__):
                self._look_at_class(value)
        elif not isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            self._look_at_object(value)

    def _look_at_object(self, value: Any) -> None:
        if id(value) in self._seen or id(value) in self._own:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._others += [child for child in value.modules() if id(child) not in self._own]
            for child in value.modules():
                self._look_at_module(child)
        elif not self.home.is_foreign(type(value).__module__):
            self._values.append(value)
            self._look_at_class(type(value))

    def _look_at_function(self, function: types.FunctionType) -> None:
        self._seen.add(id(function))
        self._functions.append(function)
        names = names_of(function.__code__)
        of_library = self.home.is_foreign(function.__module__)
        for name in names & function.__globals__.keys():
            self._look_at_variable(function.__globals__, name, name, names, of_library=of_library)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._look_at_variable(_OfCell(cell), name, name, names, of_library=of_library, key=cell)
        self._values += [value for value in (function.__defaults__ or ()) if may_change(value)]

    def _look_at_variable(
        self, space: Any, name: str, label: str, names: set[str], *, of_library: bool, key: Any = None
    ) -> None:
        try:
            value = space[name]
        except KeyError:
            return
        if isinstance(value, types.ModuleType):
            self._look_at_imported(value, names)
        elif draws_globally(value):
            self.draws = True
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
            if not self.home.is_foreign(getattr(value, "__module__", None)):
                self._look_at_callable(value)
        elif isinstance(value, nn.Module):
            self._look_at_object(value)
        elif not of_library:
            self._slot(space, name, label, space if key is None else key)
            if callable(value):
                self._look_at_callable(value)

    def _look_at_imported(self, module: types.ModuleType, names: set[str]) -> None:
        top = module.__name__.partition(".")[0]
        if module.__name__ in ("random", "numpy.random") or (top == "numpy" and "random" in names):
            self.draws = True
        if self.home.is_foreign(module.__name__):
            return
        visit = (id(module), frozenset(names))
        if visit in self._imported:  # two modules may import one another
            return
        self._imported.add(visit)
        for name in names & vars(module).keys():
            if (id(vars(module)), name) not in self._slots:
                self._look_at_variable(vars(module), name, f"{module.__name__}.{name}", names, of_library=False)

    def _slot(self, space: Any, name: str, label: str, key: Any) -> None:
        self._slots.setdefault((id(key), name), (space, name, label))

    # -- its state --------------------------------------------------------------------------------------------------

    def take(self, *, with_attributes: bool = True) -> Elsewhere:
        """Record the present state; it includes the module's own attributes unless told otherwise."""
        module = None if self._module is None else self._module()
        moment = Elsewhere()
        for key, (space, name, label) in self._slots.items():
            moment.add_slot(space, name, label, key)
        for value in self._values:
            moment.keep(value, type(value).__name__)
        for child in () if with_attributes or module is None else module.modules():
            for value in filter(is_generator, vars(child).values()):
                moment.keep(value, f"a generator of {type(child).__name__}")
        own = module.modules() if with_attributes and module is not None else ()
        for child in [*own, *self._others]:
            for name in vars(child).keys() - OF_TORCH:
                moment.add_slot(vars(child), name, f"{type(child).__name__}.{name}", (id(child), name))
        for child in self._others:
            for name in child._buffers:
                moment.add_slot(child._buffers, name, f"{type(child).__name__}.{name}", (id(child), name))
        return moment

    def generator_states(self) -> list[tuple[str, Any]]:
        """Return (place, state) of the random generators that the code keeps in attributes and variables."""
        module = None if self._module is None else self._module()
        held: list[tuple[str, Any]] = []
        for path, child in () if module is None else module.named_modules():
            held += [(f"{path or type(child).__name__}.{name}", value) for name, value in vars(child).items()]
        held += [(label, _get(space, name)) for space, name, label in self._slots.values()]
        held += [(type(value).__name__, value) for value in self._values]
        return [(label, read_generator(value)) for label, value in held if is_generator(value)]

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions whose code was searched."""
        return [function for function in self._functions if isinstance(function, types.FunctionType)]

    def variables(self) -> list[tuple[str, str, Any]]:
        """Return name, full name and value of each variable that the code looks up."""
        return [(name, label, _get(space, name)) for space, name, label in self._slots.values()]

    def plain_values(self) -> list[Any]:
        """Return the numbers, flags and texts that the code reads in variables and in attributes of objects."""
        values = [_get(space, name) for space, name, _ in self._slots.values()]
        for value in self._values:
            values += [*getattr(value, "__dict__", {}).values(), *read_slots(value).values()]
        for child in self._others:
            values += [value for name, value in vars(child).items() if name not in OF_TORCH]
        return [value if type(value) in _NUMBERS else None for value in values]

    @property
    def is_empty(self) -> bool:
        """Whether the code reaches nothing that it could change, other than attributes of its module."""
        return not (self._slots or self._values or self._others)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Outside]] = weakref.WeakKeyDictionary()


def _kinds(module: nn.Module) -> list[type]:
    return [type(child) for child in module.modules()]


def names_of(code: types.CodeType) -> set[str]:
    """Return the names that a function and its inner functions look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


class Elsewhere:
    """Values at one moment, which can be restored."""

    def __init__(self) -> None:
        self._slots: list[tuple[Any, str, str, Any, tuple[int, str]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self._inside: list[tuple[Any, Any, str]] = []
        self._seen: set[int] = set()

    def add_slot(self, space: Any, name: str, label: str, key: tuple[int, str]) -> None:
        """Record a variable and its contents, if it has been assigned."""
        value = _get(space, name)
        if value is None and name not in space:
            return
        if isinstance(value, COPIED_ITERATORS):
            value = copied(value)  # an iterator cannot be rewound: a copy at the same position replaces it
        self._slots.append((space, name, label, value, key))
        self.keep(value, label)

    def keep(self, value: Any, label: str, depth: int = _DEPTH) -> None:
        """Record the contents of a value."""
        if not depth or id(value) in self._seen or not may_change(value):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            is_plain = (
                type(value) is Tensor
                and value.layout == torch.strided
                and value.nbytes <= _MAX_BYTES
                and not value.is_meta
            )
            held = value.detach().clone() if is_plain else None
            self._tensors.append((value, value._version, held))
            return
        if isinstance(value, tuple):
            parts: Any = value
        else:
            if isinstance(value, (list, dict, set, collections.deque)) and len(value) > _MAX_ENTRIES:
                return
            parts = _with_copies(read_parts(value))
            self._inside.append((value, parts, label))
        for item in _items(parts):
            self.keep(item, label, depth - 1)

    def restore(self) -> None:
        """Restore everything."""
        for space, name, _, value, _ in self._slots:
            if _get(space, name) is not value:
                # Another copy, since this may be restored again.
                space[name] = copied(value) if isinstance(value, COPIED_ITERATORS) else value
        for value, parts, _ in self._inside:
            if not _is_same(read_parts(value), parts):
                write_parts(value, parts)
        for tensor, version, held in self._tensors:
            if tensor._version != version and held is not None:
                write_back(tensor, held, version)

    def changed(self) -> dict[Any, str]:
        """Return the changes: keys for `reaches`, with names. A dict that has only grown is a cache, and not a change."""
        found: dict[Any, str] = {}
        for space, name, label, value, key in self._slots:
            if _get(space, name) is not value and not isinstance(value, COPIED_ITERATORS):
                found[key] = label
        for value, then, label in self._inside:
            now = read_parts(value)
            has_grown = isinstance(now, dict) and all(name in now and _is_alike(now[name], then[name]) for name in then)
            if not (has_grown or _is_same(now, then)):
                found[id(value)] = label
        for tensor, version, _ in self._tensors:
            if tensor._version != version:
                found[id(tensor)] = f"a tensor of shape {list(tensor.shape)}"
        return found

    def reaches(self, changes: Mapping[Any, str]) -> list[str]:
        """Return the names of another record's changes (`changed`) that this record holds too."""
        mine: set[Any] = {id(value) for value, _, _ in self._inside} | {id(tensor) for tensor, _, _ in self._tensors}
        mine |= {key for *_, key in self._slots}
        return [label for key, label in changes.items() if key in mine]


def _get(space: Any, name: str) -> Any:
    try:
        return space[name]
    except KeyError:
        return None


def _items(parts: Any) -> Iterator[Any]:
    if isinstance(parts, dict):
        yield from parts.values()
    elif isinstance(parts, (list, tuple, set)):
        yield from parts


def _with_copies(parts: Any) -> Any:
    """Return the parts of a value with iterators copied: one cannot be rewound, so a copy replaces it."""
    if isinstance(parts, dict):
        for name in [name for name, item in parts.items() if isinstance(item, COPIED_ITERATORS)]:
            parts[name] = copied(parts[name])
    return parts


def _is_alike(now: Any, then: Any) -> bool:
    return now is then or isinstance(then, COPIED_ITERATORS)


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(now[key] is then[key] for key in now)
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    return bool(now == then)
