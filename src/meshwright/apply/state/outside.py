"""State that code keeps outside parameters and buffers: global variables, closures, class attributes, objects, generators.

A trial forward must leave all of it unchanged. What code can reach is read off its functions: the names of their module that they
use, the cells of their closures, and the contents of both. Libraries are not searched.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwright.apply.state.attributes import OF_TORCH, may_change
from meshwright.apply.state.elsewhere import Elsewhere, value_in
from meshwright.apply.state.generators import draws_globally, is_generator, read_generator
from meshwright.apply.state.grown import Grown, attributes_among, makes_attributes
from meshwright.apply.state.hook_tables import is_ours
from meshwright.apply.state.libraries import Home
from meshwright.apply.state.slots import read_slots

__all__: list[str] = []

_NUMBERS = frozenset({int, float, bool, str, complex})
_MAX_FUNCTIONS = 3000
"""Functions that are followed; more are those of a library that is not known by name [count]."""


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
        self._owners: dict[int, list[type]] = {}
        self._found_alone: set[int] = set()
        self._classes: list[type] = []
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
        self._own_functions = [own for own in self.functions if not self.home.is_foreign(own.__module__)]
        self._names = {name for function in self._own_functions for name in names_of(function.__code__)}
        self._find_class_attributes()

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
        for hook in _hooks_of(module):
            self._look_at_callable(hook)

    def _look_at_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or base.__module__.partition(".")[0] in ("torch", "builtins", "meshwright"):
                continue
            self._seen.add(id(base))
            for value in list(vars(base).values()):
                inner = [value.fget, value.fset] if isinstance(value, property) else [value]
                if isinstance(value, (functools.partialmethod, functools.cached_property)):
                    inner = [value.func]
                for function in [getattr(item, "__func__", item) for item in inner]:
                    if isinstance(function, types.FunctionType):
                        self._owners.setdefault(id(function), []).append(base)
                        self._look_at_callable(function, is_method=True)
            if not self.home.is_foreign(base.__module__):
                self._classes.append(base)

    def _find_class_attributes(self) -> None:
        """Note the class attributes that code names, wherever it is; some are there only once it has run."""
        for kind in self._classes:
            for name in attributes_among(vars(kind).keys(), self._names):
                if not isinstance(vars(kind)[name], (types.FunctionType, property, classmethod, staticmethod)):
                    self._slot(_OfClass(kind), name, f"{kind.__name__}.{name}", kind)

    def _look_at_callable(self, value: Any, *, is_method: bool = False) -> None:
        if not is_method:
            self._found_alone.add(id(value))
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
            owner = getattr(value, "__module__", None)
            is_helper = isinstance(value, types.FunctionType) and self.home.has_beside(owner)
            if is_helper or not self.home.is_foreign(owner):
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
        self._find_class_attributes()
        moment = Elsewhere(Grown(self._classes, self._names, self._own_functions))
        for function in self._own_functions:
            if function.__dict__:
                moment.keep(function.__dict__, function.__qualname__)
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
        held += [(label, value_in(space, name)) for space, name, label in self._slots.values()]
        held += [(type(value).__name__, value) for value in self._values]
        return [(label, read_generator(value)) for label, value in held if is_generator(value)]

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions whose code was searched."""
        return [function for function in self._functions if isinstance(function, types.FunctionType)]

    def classes_of(self, function: Any) -> list[type]:
        """Return the classes that a function was found in as a method; none where it was found in another way as well."""
        return [] if id(function) in self._found_alone else self._owners.get(id(function), [])

    def variables(self) -> list[tuple[str, str, Any]]:
        """Return name, full name and value of each variable that the code looks up."""
        return [(name, label, value_in(space, name)) for space, name, label in self._slots.values()]

    def objects(self) -> list[Any]:
        """Return the objects that the code reaches, and modules that are no part of its own."""
        return [*self._values, *self._others]

    def plain_values(self) -> list[Any]:
        """Return the numbers, flags and texts that the code reads in variables and in attributes of objects."""
        values = [value_in(space, name) for space, name, _ in self._slots.values()]
        for value in self._values:
            values += [*getattr(value, "__dict__", {}).values(), *read_slots(value).values()]
        for child in self._others:
            values += [value for name, value in vars(child).items() if name not in OF_TORCH]
        return [value if type(value) in _NUMBERS else None for value in values]

    @property
    def is_empty(self) -> bool:
        """Whether the code reaches nothing that it could change, other than attributes of its module."""
        if self._slots or self._values or self._others:
            return False
        return not any(makes_attributes(function.__code__) for function in self._own_functions)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Outside]] = weakref.WeakKeyDictionary()


def _kinds(module: nn.Module) -> list[Any]:
    return [(type(child), *map(id, _hooks_of(child))) for child in module.modules()]


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the user's hooks of a module, those of its backward too: trials take gradients."""
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for table in tables if table for hook in table.values()]
    return [hook for hook in hooks if not is_ours(hook)]


def names_of(code: types.CodeType) -> set[str]:
    """Return the names that a function and its inner functions look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names
