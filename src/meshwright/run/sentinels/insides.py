"""Contents of containers and objects that modules and the loss hold, and variables that their code reads, watched between steps.

A script may change them on one rank alone: an entry of a dict, an attribute of a configuration, a global, an attribute of a
class, a variable of the loss function. They may as well be notes, so differences are told, once each.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.state.attributes import is_object
from meshwright.apply.state.outside import Outside
from meshwright.run.sentinels.settings import text_of

__all__: list[str] = []

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Types of values that hold nothing."""
_LEAVES = (nn.Module, Tensor, type)
_BASES: tuple[Any, ...] = (dict, list, set, collections.deque)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
_DEPTH = 3
"""Containers and objects inside of one another that are searched [count]."""
_MAX_ENTRIES = 256
"""Of a container that is watched; a larger one is data, or a log [count]."""
_MAX_HELD = 10_000
"""Entries that are watched in all [count]."""
_MAX_TOLD = 20
"""Differences after which the rest are notes, too [count]."""
_MAX_FOUND = 64
"""Times that modules may get other attributes before what those hold is watched no more [count]."""
_ABSENT = object()

_VARIABLE = "variable "

Roots = Sequence[tuple[str, Any]]
"""(what holds it, in words; the value)."""


class _Inside:
    """A dict, an object's attributes, or a sequence, with its name in words."""

    def __init__(self, label: str, inside: Any, word: str) -> None:
        self.label = label
        self.inside = inside
        self.word = word
        """What has a name there: "entry" or "attribute"."""
        base = next(base for base in _BASES if isinstance(inside, base))
        self.iterate: Callable[[Any], Iterator[Any]] = base.__iter__
        """The base's method: a class may give for an entry what it makes of it."""
        self.size: Callable[[Any], int] = base.__len__

    def name(self, key: Any) -> str:
        return f"{self.word} {text_of(key) or '...'} of {self.label}"


class _Roots:
    """Attributes or variables that may hold something, but for those that are replaced now and then, such as caches."""

    def __init__(self) -> None:
        self._slots: Sequence[Any] = ()
        self._values: list[Any] = []
        self._unsteady: set[Any] = set()
        self._num_found = 0

    def take(self, slots: Sequence[Any], values: list[Any]) -> bool:
        """Take the present values; tell whether what they hold is to be sought again."""
        before, old = self._slots, self._values
        self._slots, self._values = slots, values
        if before is not slots and before != slots:
            self._num_found += 1
            return self._num_found <= _MAX_FOUND
        if all(map(operator.is_, old, values)):
            return False
        replaced = {
            slot
            for slot, was, now in zip(slots, old, values, strict=True)
            if was is not now and (_may_hold(was) or _may_hold(now)) and slot not in self._unsteady
        }
        self._unsteady |= replaced
        return bool(replaced)

    def holding(self, name_of: Callable[[Any], str]) -> Iterator[tuple[str, Any]]:
        for slot, value in zip(self._slots, self._values, strict=True):
            if _may_hold(value) and slot not in self._unsteady:
                yield name_of(slot), value


class InsidesWatch:
    """What is held outside of attributes of modules, as a step, an evaluation or the last look left it.

    A look costs about 0.03 microseconds for each entry, and a microsecond for each that has changed.

    Args:
        module: The model.
        loss_fn: The loss, or None.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._outside = [Outside.of(module)]
        if loss_fn is not None:
            self._outside.append(Outside(None, [loss_fn]))
        self._of_loss: Roots = [] if loss_fn is None else list(_roots_of_callable("the loss function", loss_fn))
        self._tables: list[_Inside] = []
        self._rows: list[_Inside] = []
        self._links: list[tuple[Any, Any, Any, str]] = []
        """(container, key or place, container inside of it, its name) of what was found."""
        self._unsteady: set[str] = set()
        self._attributes, self._named = _Roots(), _Roots()
        self._before: Any = None
        self._num_told = 0
        self.changed: dict[str, Callable[[], Any]] = {}
        """What was set since the last `take`, by name, with its present value."""

    @property
    def is_on(self) -> bool:
        """Whether anything is watched still."""
        return self._num_told < _MAX_TOLD

    def note(self, slots: Sequence[Any], values: list[Any], name_of: Callable[[Any], str]) -> None:
        """Take what is held now as known.

        Args:
            slots: Places of attributes of the modules.
            values: What is there.
            name_of: Returns such a place in words.
        """
        if not self.is_on:
            return
        labels, held = self._variables()
        are_new = [self._attributes.take(slots, values), self._named.take(labels, held), self._has_replaced()]
        if any(are_new):
            found = itertools.chain(self._attributes.holding(name_of), self._named.holding(_variable_name))
            self._find([*found, *self._of_loss])
        self._before = self._read(), labels, held

    def _has_replaced(self) -> bool:
        """Tell whether a container inside of another one was replaced, such as a cache: it is watched no more, and not kept."""
        replaced = [link[3] for link in self._links if _entry_of(link[0], link[1]) is not link[2]]
        self._unsteady.update(replaced)
        return bool(replaced)

    def _find(self, holding: Roots) -> None:
        self._tables, self._rows, self._links = [], [], []
        self._seen: dict[int, Any] = {}
        self._room = _MAX_HELD
        for name, value in holding:
            self._walk(name, value, _DEPTH)
        self._seen = {}

    def _walk(self, label: str, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or not _may_hold(value):
            return
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                self._walk(f"place {place} of {label}", item, depth - 1)
            return
        inside = self._inside_of(value)
        if inside is None:
            return
        held = _Inside(label, inside, "entry" if inside is value else "attribute")
        if (size := held.size(inside)) > min(_MAX_ENTRIES, self._room):
            return
        self._seen[id(value)] = value
        self._room -= size
        if isinstance(inside, dict):
            self._tables.append(held)
            for key, item in list(dict.items(inside)):
                if _may_hold(item):
                    self._walk_into(inside, key, held.name(key), item, depth - 1)
            return
        self._rows.append(held)
        if isinstance(inside, list):
            for place, item in enumerate(list(held.iterate(inside))):
                if _may_hold(item):
                    self._walk_into(inside, place, f"place {place} of {label}", item, depth - 1)

    def _walk_into(self, container: Any, key: Any, label: str, item: Any, depth: int) -> None:
        num_found = len(self._seen)
        if label not in self._unsteady:
            self._walk(label, item, depth)
        if len(self._seen) > num_found:
            self._links.append((container, key, item, label))

    def _inside_of(self, value: Any) -> Any:
        """Return a container, the attributes of an object of the user's, or None."""
        if isinstance(value, _BASES):
            return value
        is_foreign = all(outside.home.is_foreign(type(value).__module__) for outside in self._outside)
        if not is_object(value) or (is_foreign and type(value) not in _RECORDS):
            return None
        return getattr(value, "__dict__", None)

    def _variables(self) -> tuple[list[str], list[Any]]:
        """Return names and values of the variables that the code looks up."""
        found = [(label, value) for outside in self._outside for _, label, value in outside.variables()]
        return [label for label, _ in found], [value for _, value in found]

    def _read(self) -> list[list[Any]]:
        """Return sizes, keys and values of tables, and sizes and entries of the other containers."""
        tables = [held.inside for held in self._tables]
        sizes, lengths = list(map(dict.__len__, tables)), [held.size(held.inside) for held in self._rows]
        if max(sizes, default=0) > _MAX_ENTRIES or max(lengths, default=0) > _MAX_ENTRIES:  # a log that grows
            self._tables = [held for held in self._tables if held.size(held.inside) <= _MAX_ENTRIES]
            self._rows = [held for held in self._rows if held.size(held.inside) <= _MAX_ENTRIES]
            return self._read()
        return [
            sizes,
            list(itertools.chain.from_iterable(map(dict.keys, tables))),
            list(itertools.chain.from_iterable(map(dict.values, tables))),
            lengths,
            list(itertools.chain.from_iterable(held.iterate(held.inside) for held in self._rows)),
        ]

    def look(self) -> None:
        """Remember what was set since `note`; called before modules run again."""
        if self._before is None or not self.is_on:
            return
        (before, labels, held), self._before = self._before, None  # values of a step live no longer than it
        now = self._read()
        _, values = self._variables()
        if _differ(held, values):
            for label, was, value in zip(labels, held, values, strict=True):
                if _differ([was], [value]):
                    self._set(_variable_name(label), functools.partial(self._variable, label))
        pairs = zip(before[1:3], now[1:3], strict=True)
        are_same = all(len(was) == len(is_now) and all(map(operator.is_, was, is_now)) for was, is_now in pairs)
        if not are_same and len(before[0]) == len(now[0]):
            self._find_entries(before, now)
        if len(before[3]) == len(now[3]) and _differ(before[4], now[4]):
            for held, was, is_now in zip(self._rows, _cut(before[4], before[3]), _cut(now[4], now[3]), strict=True):
                if _differ(was, is_now):
                    self._set(held.label, functools.partial(_value, held.inside))

    def _find_entries(self, before: list[list[Any]], now: list[list[Any]]) -> None:
        then = zip(_cut(before[1], before[0]), _cut(before[2], before[0]), strict=True)
        these = zip(_cut(now[1], now[0]), _cut(now[2], now[0]), strict=True)
        for held, (keys, values), (new_keys, new_values) in zip(self._tables, then, these, strict=True):
            if not _differ(keys, new_keys) and not _differ(values, new_values):
                continue
            was = dict(zip(keys, values, strict=True))
            for key in dict.fromkeys([*keys, *new_keys]):
                if _differ([was.get(key, _ABSENT)], [dict.get(held.inside, key, _ABSENT)]):
                    self._set(held.name(key), functools.partial(dict.get, held.inside, key, _ABSENT))

    def _set(self, name: str, value: Callable[[], Any]) -> None:
        self.changed[name] = value

    def _variable(self, name: str) -> Any:
        """Return a variable's value; of several modules' variables of this name the texts."""
        values = [value for label, value in zip(*self._variables(), strict=True) if label == name]
        return values[0] if len(values) == 1 else sorted(told_text(value) or "..." for value in values)

    def take(self) -> dict[str, Callable[[], Any]]:
        """Return what was set since the last call, by name, with its present value."""
        taken, self.changed = self.changed, {}
        return taken

    def text(self, name: str) -> str:
        """Return what a name holds now, which another rank has changed."""
        if name.startswith(_VARIABLE):
            return told_text(self._variable(name.removeprefix(_VARIABLE))) or "..."
        for held in self._rows:
            if held.label == name:
                return told_text(held.inside) or "..."
        for held in self._tables:
            if name.endswith(f" of {held.label}"):
                for key, value in list(dict.items(held.inside)):
                    if held.name(key) == name:
                        return told_text(value) or "..."
        return "not there"

    def tell(self) -> None:
        """Count a difference that was told: scripts that note much in what code reads are told of some of it."""
        self._num_told += 1


def told_text(value: Any) -> str | None:
    """Return a value as text, also an object's of a user's class; None for a value without such a text."""
    if value is _ABSENT:
        return "not there"
    try:
        text = text_of(value)
        if text is None and is_object(value) and not isinstance(value, _LEAVES):
            return f"{type(value).__qualname__} {text_of(getattr(value, '__dict__', None))}"
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises when it is read
        return None
    return text


def _roots_of_callable(label: str, function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield f"the arguments of {label}", function.keywords
        yield f"the arguments of {label} by place", function.args
        yield from _roots_of_callable(label, function.func)
    elif isinstance(function, types.MethodType):
        yield label, function.__self__
    elif isinstance(function, types.FunctionType):
        yield f"the attributes of {label}", function.__dict__
    else:
        yield label, function


def _may_hold(value: Any) -> bool:
    return type(value) not in ATOMS and not isinstance(value, _LEAVES)


def _variable_name(label: str) -> str:
    return _VARIABLE + label


def _entry_of(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return dict.get(container, key)
    return list.__getitem__(container, key) if key < list.__len__(container) else None


def _value(value: Any) -> Any:
    return value


def _cut(flat: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    start = 0
    for size in sizes:
        yield flat[start : start + size]
        start += size


def _differ(before: Sequence[Any], now: Sequence[Any]) -> bool:
    if len(before) == len(now) and all(map(operator.is_, before, now)):
        return False
    return len(before) != len(now) or any(
        was is not new and not (type(was) is type(new) and type(was) in ATOMS and was == new)
        for was, new in zip(before, now, strict=True)
    )
