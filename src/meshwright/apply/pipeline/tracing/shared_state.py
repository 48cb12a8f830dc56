"""State that a layer changes and other code uses: attributes without tensors, global variables, closures, generators.

Only the stage that runs a layer sees such a change. Layers that use each other's attributes are kept on one stage. Code between
the layers runs on every stage, and is refused, as is what layers share outside of modules. Who uses an attribute is read off the
functions: the names they load, of the objects they reach.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshwright.apply.pipeline.tracing.call_trace import Slot, modules_around
from meshwright.apply.pipeline.tracing.scene import VARS, Path, fields_of, holds_tensors, resolve
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.outside import Elsewhere, Outside
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.trees import LEAVES

__all__: list[str] = []

_NOT_FOLLOWED = (frozenset({"torch", "numpy", "builtins", "meshwright"}) | sys.stdlib_module_names) - {"__main__"}
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_NOT_IN_FORWARD = (
    "__init__",
    "__new__",
    "__post_init__",
    "__repr__",
    "__str__",
    "__getstate__",
    "__setstate__",
    "__deepcopy__",
)
_DEPTH = 6  # of containers and objects inside each other
_MAX_FUNCTIONS = 3000
"""Functions that are followed [count]."""


class Watch(NamedTuple):
    """What units may write with later batches, and other code uses: fields of `Flow`."""

    watched: dict[str, tuple[Slot, ...]]
    lent: dict[str, tuple[tuple[Slot, str], ...]]
    named: tuple[str, ...]


class SharedState:
    """What units change, and its other users.

    Args:
        module: The model.
        units: Names of the modules that are dealt out to stages.
    """

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        self._module = module
        self._units = units
        self._caches = contextlib.ExitStack()
        self._uses: dict[str, _AttributeUses] = {}
        self._outside: dict[str, Outside] = {}
        self._changes_outside: dict[str, dict[Any, str]] = {}
        self._changes: dict[str, dict[tuple[int, str | None], str]] = {}

    def begin(self, name: str, unit: nn.Module) -> Elsewhere:
        """Return the state outside of modules that a unit's code can reach before its call."""
        if name not in self._outside:
            self._outside[name] = Outside(unit)
        # A tensor that one unit caches is another one's own: each stage would compute it.
        self._caches.enter_context(no_cached_tensors(unit))
        return self._outside[name].take(with_attributes=False)

    def end(self, name: str, before: Elsewhere) -> None:
        """Record what the call has changed of it."""
        self._caches.close()
        changes = before.changed()
        if changes:
            self._changes_outside.setdefault(name, {}).update(changes)

    @property
    def units(self) -> tuple[str, ...]:
        """The units that change any attribute."""
        return tuple(sorted(self._changes))

    def note(self, unit: str, path: Path, key: Any) -> None:
        """Record that a unit has changed an entry of an object's attributes or of a container among attributes."""
        if len(path) == 1 and self._is_cached(path[0][1], key):
            return
        place = resolve(path, (), {}, self._module.get_submodule)
        names = [str(part) for part in path[1:] if part != VARS]
        is_attributes = len(path) == 1 or path[-1] == VARS
        if is_attributes:
            names.append(str(key))
        of = f"'{path[0][1]}'" if path[0][1] else "the model"
        text = f"layer '{unit}' changes '{'.'.join(names)}' of {of}"
        self._changes.setdefault(unit, {})[id(place), str(key) if is_attributes else None] = text

    def note_for_some(
        self, changes: Mapping[str, Iterable[tuple[Path, Any]]], outside: Mapping[str, Mapping[Any, str]]
    ) -> None:
        """Record what units change for some values: entries in the form of `note`, and state outside of modules."""
        for unit in self._units:
            if outside.get(unit):
                self._changes_outside.setdefault(unit, {}).update(outside[unit])
            for path, key in changes.get(unit, ()):
                self.note(unit, path, key)

    def watched(self, changed: Collection[int]) -> Watch:
        """Return what units may write with later batches, and other code uses.

        Args:
            changed: Ids of buffers that units have written with this batch.
        """
        found: dict[int, list[tuple[str, Slot, bool]]] = {}
        # Those who use what another unit changes share its stage (`bonds`): no other stage has to have it.
        known_changes = set[tuple[int, str | None]]().union(*self._changes.values())
        for unit in self._units:
            for name, module in self._module.get_submodule(unit).named_modules(prefix=unit):
                plain = [key for key, value in vars(module).items() if key not in OF_TORCH and _is_plain(value)]
                own = [(key, id(buffer) in changed) for key, buffer in module._buffers.items()]
                own += [(key, (id(vars(module)), key) in known_changes) for key in plain]
                found.setdefault(id(vars(module)), []).extend((unit, (name, key), known) for key, known in own)
        uses = self._uses_around
        used: dict[str, list[Slot]] = {unit: [] for unit in self._units}
        for unit, slot, _ in uses.among(found):
            used[unit].append(slot)
        lent: dict[str, list[tuple[Slot, str]]] = {}
        for reader in self._units:
            for unit, slot, is_known in self._uses_of(reader).among(found, but=reader):
                if not is_known:
                    lent.setdefault(unit, []).append((slot, reader))
        for unit, slots in lent.items():
            used[unit] = [*dict.fromkeys([*used[unit], *(slot for slot, _ in slots)])]
        kinds = {type(child) for unit in self._units for child in self._module.get_submodule(unit).modules()}
        return Watch(
            {unit: tuple(slots) for unit, slots in used.items() if slots},
            {unit: tuple(slots) for unit, slots in lent.items()},
            uses.names_of(kinds),
        )

    def is_used_outside(self, unit: str, slot: Slot) -> bool:
        """Tell whether code between units, or another unit's, uses an attribute of a module of this unit."""
        change = id(vars(self._module.get_submodule(slot[0]))), slot[1]
        others = (self._uses_of(name) for name in self._units if name != unit)
        return self._uses_around.includes(change) or any(uses.includes(change) for uses in others)

    @functools.cached_property
    def _uses_around(self) -> _AttributeUses:
        """What the code between units uses, once the forward is over."""
        return _AttributeUses(self._module, [child for _, child in modules_around(self._module, self._units)])

    def _uses_of(self, unit: str) -> _AttributeUses:
        """Return what a unit's code uses, once the forward is over."""
        if unit not in self._uses:
            self._uses[unit] = _AttributeUses(self._module.get_submodule(unit))
        return self._uses[unit]

    def _is_cached(self, name: str, key: Any) -> bool:
        """Tell whether a module keeps the result of a `functools.cached_property` there: every stage computes it for itself."""
        kind = type(self._module.get_submodule(name))
        return isinstance(inspect.getattr_static(kind, str(key), None), functools.cached_property)

    def bonds(self) -> dict[str, tuple[str, ...]]:
        """Return each attribute that one unit changes and others use, as text -> the units, which must share a stage."""
        if not self._changes:
            return {}
        found: dict[str, tuple[str, ...]] = {}
        for unit, changes in self._changes.items():
            for change, text in changes.items():
                users = [other for other in self._units if other != unit and self._uses_of(other).includes(change)]
                if users:
                    found[f"{text}, which layer '{users[0]}' uses as well"] = (unit, *users)
        return found

    def texts(self) -> Iterator[str]:
        """Yield a text for each state outside of modules that a unit changes and others use, and for each attribute that a unit
        changes and the code between the units uses.
        """
        around = [child for _, child in modules_around(self._module, self._units)]
        if self._changes_outside:
            yield from self._texts_outside(around)
        if self._changes:
            uses = self._uses_around
            for changes in self._changes.values():
                for change, text in changes.items():
                    if uses.includes(change):
                        yield f"{text}, which the code between layers uses as well"

    def _texts_outside(self, around: Sequence[nn.Module]) -> Iterator[str]:
        users = {f"layer '{name}'": outside for name, outside in self._outside.items()}
        users["the code between layers"] = Outside(None, [type(child).forward for child in around])
        for name, changes in self._changes_outside.items():
            for user, outside in users.items():
                used = outside.take(with_attributes=False).reaches(changes) if user != f"layer '{name}'" else []
                if used:
                    yield f"layer '{name}' changes {used[0]}, which {user} uses as well"
                    break


def _is_plain(value: Any) -> bool:
    return type(value) in LEAVES or (isinstance(value, (list, tuple, dict, set)) and not holds_tensors(value))


class _AttributeUses:
    """Objects that the code of some modules can reach, and the names that it loads.

    Args:
        module: Where it begins.
        own: Those of its modules whose code it is; all of them where not told.
    """

    def __init__(self, module: nn.Module, own: Sequence[nn.Module] | None = None) -> None:
        self._names_of: dict[int, set[str]] = {}
        self._owners: dict[int, type] = {}
        self._seen: dict[int, Any] = {}
        self._reach(module, "", _DEPTH)
        held: dict[str, dict[type, None]] = {}
        for place, names in self._names_of.items():
            for name in names:
                held.setdefault(name, {})[self._owners[place]] = None
        self._held = held
        self._own = list(module.modules()) if own is None else own

    @functools.cached_property
    def _code(self) -> _AttributeNames:
        return _AttributeNames(self._held, self._own)

    def among(
        self, slots: Mapping[int, Iterable[tuple[str, Slot, bool]]], but: str | None = None
    ) -> Iterator[tuple[str, Slot, bool]]:
        """Yield those of (unit, where, is known) that this code uses, listed by the place; not those of one unit."""
        for place, entries in slots.items():
            for entry in entries if place in self._names_of else ():
                if entry[0] != but and self.includes((place, entry[1][1])):
                    yield entry

    def names_of(self, kinds: Collection[type]) -> tuple[str, ...]:
        """Return the names that this code loads of objects of these classes, as far as it can be told."""
        of_self = self._code.of_self.items()
        own = {name for name, loaders in of_self if any(issubclass(kind, tuple(loaders)) for kind in kinds)}
        return tuple(sorted(self._code.names | own))

    def includes(self, change: tuple[int, str | None]) -> bool:
        """Tell whether this code uses an entry of a place; a container counts as a whole, by its name."""
        place, key = change
        if place not in self._names_of:
            return False
        if key is None:
            return any(name in self._code.names or name in self._code.of_self for name in self._names_of[place])
        kinds = self._code.of_self.get(key, set[type]())
        return key in self._code.names or any(issubclass(self._owners[place], kind) for kind in kinds)

    def _reach(self, item: Any, name: str, depth: int) -> None:
        if isinstance(item, types.MethodType):
            item = item.__self__
        elif isinstance(item, weakref.ReferenceType):
            item = item()
        if not depth or item is None or isinstance(item, (Tensor, type, types.ModuleType)):
            return
        inner = _inside(item)
        if inner is None:
            return
        place = id(getattr(item, VARS, item))
        known = self._names_of.setdefault(place, set())
        if id(item) in self._seen and name in known:
            return
        self._seen[id(item)] = item
        known.add(name)
        is_container = isinstance(item, (list, dict, tuple, set))
        self._owners[place] = type(item)
        for key, value in inner:
            self._reach(value, name if is_container else key, _DEPTH if isinstance(value, nn.Module) else depth - 1)


def _inside(item: Any) -> list[tuple[str, Any]] | None:
    """Return the contents of a module, object or container, by attribute; None for anything else."""
    if isinstance(item, nn.Module):
        return [*((key, value) for key, value in vars(item).items() if key not in OF_TORCH), *item._modules.items()]
    if isinstance(item, functools.partial):
        return [("", value) for value in (item.func, *item.args, *item.keywords.values())]
    if isinstance(item, (list, tuple, set)):
        return [("", value) for value in item]
    fields = item if isinstance(item, dict) else fields_of(item)
    return None if fields is None else [(str(key), value) for key, value in fields.items()]


class _AttributeNames:
    """The attribute names that the forwards of modules load, with those of the functions they call.

    Args:
        held: Attribute's name -> classes of what lies there, whose methods may be called.
        modules: The modules.
    """

    def __init__(self, held: Mapping[str, Iterable[type]], modules: Iterable[nn.Module]) -> None:
        self.names: set[str] = set()
        """Loaded of anything."""
        self.of_self: dict[str, set[type]] = {}
        """Name -> the classes whose methods load it of their own object."""
        self._seen: set[int] = set()
        self._todo: list[tuple[Any, type | None]] = []
        self._methods: dict[str, list[tuple[Any, type | None]]] = {}
        kinds = dict.fromkeys(kind for found in held.values() for kind in found)
        # By identity: the class that a plan gives to a module is equal to the user's, and has none of its methods.
        for base in {id(base): base for kind in kinds for base in kind.__mro__}.values():
            if _is_followed(base):
                for name, value in vars(base).items():
                    self._methods.setdefault(name, []).append((value, base))
        # Operators and protocols call these without their names: code that loads the object may call them.
        self._unnamed = {name: [entry for kind in found for entry in _unnamed(kind)] for name, found in held.items()}
        for module in modules:
            self._todo += _unnamed(type(module))
            own = (value for value in vars(module).values() if callable(value))
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            self._todo += [(value, None) for value in (*own, *hooks)]
            self._todo += [(vars(base).get("forward"), base) for base in type(module).__mro__]
        while self._todo and len(self._seen) < _MAX_FUNCTIONS:
            self._follow(*self._todo.pop())

    def _follow(self, function: Any, of: type | None) -> None:
        function = function.fget if isinstance(function, property) else function
        function = function.func if isinstance(function, functools.partial | functools.cached_property) else function
        of = None if isinstance(function, (classmethod, staticmethod)) else of
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or not _is_followed(function):
            return
        self._seen.add(id(function))
        self._todo += [(cell.cell_contents, None) for cell in function.__closure__ or () if cell != types.CellType()]
        for name, receiver in _loaded(function.__code__):
            if receiver == _GLOBAL:
                self._todo.append((function.__globals__.get(name), None))
                continue
            if name not in self.names and name not in self.of_self:
                self._todo += (*self._methods.get(name, ()), *self._unnamed.get(name, ()))
            if receiver == _SELF and of is not None:
                self.of_self.setdefault(name, set()).add(of)
            else:
                self.names.add(name)


def _unnamed(kind: type) -> list[tuple[Any, type | None]]:
    """Return the methods of a class that operators and protocols call, with the classes that define them."""
    return [
        (value, base)
        for base in kind.__mro__
        if _is_followed(base)
        for name, value in vars(base).items()
        if name.startswith("__") and name not in _NOT_IN_FORWARD
    ]


def _is_followed(item: Any) -> bool:
    return (getattr(item, "__module__", None) or "").partition(".")[0] not in _NOT_FOLLOWED


_GLOBAL, _SELF, _ANY = "global", "self", "any"


def _loaded(code: types.CodeType, *, is_outer: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the names that code loads, and of what; its string constants count, since `getattr` may take them."""
    first = code.co_varnames[0] if is_outer and code.co_argcount else None
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield str(step.argval), _GLOBAL
        elif step.opname in _LOADS:
            is_of_first = before.opname.startswith("LOAD_FAST") and before.argval == first
            yield str(step.argval), _SELF if is_of_first else _ANY
        if step.opname not in ("COPY", "DUP_TOP"):  # of `self.calls += 1`
            before = step
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded(constant, is_outer=False)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant, _ANY
