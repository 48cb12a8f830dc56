"""Base of all values that pass between folders: checked fields, JSON both ways, a content hash.

A value is a frozen, keyword-only dataclass with slots that derives from ``Value``. Its ``__post_init__`` calls
``self._check_types()``, which also turns lists into tuples and mappings into ``FrozenMap``, then collects every broken
rule in a ``Problems`` and raises them together.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, Self, TypeVar, cast

from meshwright.errors import ConfigError, closest_word, did_you_mean, instead_of
from meshwright.texts import parse_json

__all__: list[str] = []

V = TypeVar("V")

MOST_WHOLE: Final = 2**63 - 1
"""Largest whole number of a value: what other programs read of JSON, and products of several stay within a float."""
_WRITE_ANEW: Final = "name a file that this library wrote, or write it anew, with to_json()"


class FrozenMap(Mapping[str, V]):
    """A read-only, hashable, picklable mapping from text, in the order of its keys.

    >>> FrozenMap({"b": 1, "a": 2})
    FrozenMap({'a': 2, 'b': 1})
    """

    __slots__ = ("_entries", "checked")

    _entries: dict[str, V]
    checked: Any
    """The annotation that its entries are known to fit; None where they were not checked."""

    def __init__(self, entries: Mapping[str, V] | None = None, checked: Any = None) -> None:
        given = entries or {}
        self._entries = {key: given[key] for key in sorted(given)}
        self.checked = checked

    def __getitem__(self, key: str) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._entries!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (FrozenMap, (dict(self._entries),))


class Problems:
    """Everything that is wrong with one value, reported at once.

    Args:
        subject: The value's name in messages, for example "plan".
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._messages: list[str] = []
        self._fixes: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, message: str, *, fix: str | None = None) -> None:
        """Add one problem: the numbers and the rule, and a fix where one is known."""
        self._messages.append(message)
        self.suggest(fix)

    def suggest(self, fix: str | None) -> None:
        """Add a fix, once."""
        if fix and fix not in self._fixes:
            self._fixes.append(fix)

    def require(self, holds: bool, message: str, *, fix: str | None = None) -> None:
        """Add the problem unless the rule holds."""
        if not holds:
            self.add(message, fix=fix)

    def check(self) -> None:
        """Raise all problems together.

        Raises:
            ConfigError: There was at least one problem; the message has all of them.
        """
        if not self._messages:
            return
        fix = "; ".join(self._fixes) or None
        if len(self._messages) == 1:
            raise ConfigError(f"{self._subject}: {self._messages[0]}", fix=fix)
        lines = "".join(f"\n  - {message}" for message in self._messages)
        raise ConfigError(f"{self._subject}: {len(self._messages)} problems{lines}", fix=fix)


class Value:
    """The base of all values: JSON both ways, versioned, with a content hash.

    A field with ``compare=False`` explains the value and is not part of it: ``==`` and ``hash`` leave it out.
    """

    __slots__ = ()

    FORMAT: ClassVar[str] = "value"
    VERSION: ClassVar[int] = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, without the format's name and version."""
        return {field.name: _plain(getattr(self, field.name)) for field in _fields(type(self))}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Build the value from what ``to_dict`` returned.

        Raises:
            ConfigError: A key is unknown or missing, or a value breaks a rule.
        """
        problems = Problems(cls.FORMAT)
        names = {field.name for field in _fields(cls)}
        for key in sorted(set(entries) - names):
            known = f"; known: {', '.join(sorted(names))}"
            problems.add(f"unknown key '{key}'{did_you_mean(key, names)}{known}", fix=instead_of(key, names))
        for field in _fields(cls):
            missing = _is_required(field) and field.name not in entries
            problems.require(not missing, f"the key '{field.name}' is missing", fix=f"add '{field.name}'")
        problems.check()
        return cls(**entries)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the value as JSON text, with its format and version.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        import json  # as in `hash`: most commands write none

        head = {"format": f"meshwright.{self.FORMAT}", "version": self.VERSION}
        return json.dumps(head | self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: The text is not JSON, has another format or a newer version, or breaks a rule.
        """
        try:
            loaded: object = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"{cls.FORMAT}: not JSON: {error}", fix=_WRITE_ANEW) from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{cls.FORMAT}: expected a JSON object, got {type(loaded).__name__}", fix=_WRITE_ANEW)
        entries = cast("dict[str, Any]", loaded)
        name, version = entries.pop("format", None), entries.pop("version", None)
        if name != f"meshwright.{cls.FORMAT}":
            expected = f"expected 'meshwright.{cls.FORMAT}'"
            raise ConfigError(f"{cls.FORMAT}: the format is {name!r}, {expected}", fix=_WRITE_ANEW)
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= cls.VERSION:
            raise ConfigError(
                f"{cls.FORMAT}: version {version!r} cannot be read; this release reads 1 to {cls.VERSION}",
                fix="install the release of meshwright that wrote it",
            )
        return cls.from_dict(entries)

    @property
    def hash(self) -> str:
        """The sha256 of what differs from the defaults, in hex: the same in every process and release."""
        import hashlib  # its libraries take ten milliseconds to load, and most commands hash nothing
        import json

        differing: dict[str, Any] = {}
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            if field.compare and not _is_default(field, value):
                differing[field.name] = _plain(value)
        canonical = json.dumps(
            {"format": self.FORMAT, **differing}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; every rule is checked again.

        Raises:
            ConfigError: A field is unknown, or the result breaks a rule.
        """
        names = {field.name for field in _fields(type(self))}
        problems = Problems(self.FORMAT)
        for key in changes:
            if key not in names:  # the hint costs far more than the rest
                problems.add(f"unknown field '{key}'{did_you_mean(key, names)}", fix=instead_of(key, names))
        problems.check()
        return cast("Self", dataclasses.replace(cast("Any", self), **changes))

    def _check_types(self) -> None:
        """Check every field against its annotation; lists become tuples, mappings ``FrozenMap``, ints floats."""
        problems = Problems(self.FORMAT)
        hints = _hints(type(self))
        for field in _fields(type(self)):
            given, hint = getattr(self, field.name), hints[field.name]
            try:
                object.__setattr__(self, field.name, coerce(given, hint))
            except MismatchError as mismatch:
                problems.add(f"{field.name}{mismatch}", fix=_fix_of(field, given, hint))
        problems.check()

    def _set(self, **values: object) -> None:
        """Set fields of the frozen value; for ``__post_init__`` only."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


class MismatchError(Exception):
    """A value does not fit its annotation; the text continues the field's name."""


def coerce(value: object, hint: Any) -> Any:
    """Return the value in the annotation's type.

    Understands ``int float str bool None``, enums, ``Literal``, unions, ``tuple[X, ...]``, ``Mapping[str, X]`` and
    ``Value`` classes.

    Raises:
        MismatchError: It does not fit.

    >>> coerce([1, 2], tuple[int, ...])
    (1, 2)
    """
    kind = type(value)
    if kind is hint and (kind is str or kind is bool or isinstance(value, Value)):
        return value  # a value has checked itself, and is frozen
    if kind is FrozenMap and cast("FrozenMap[Any]", value).checked is hint:
        return value
    origin, arguments = _parts(hint)
    if hint is Any or hint is object:
        return freeze(value)
    if origin is Literal:
        return _coerce_choice(value, arguments)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, arguments)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise MismatchError(f" must be a list, got {_show(value)}")
        entries = cast("list[object]", value)
        return tuple(_at(f"[{index}]", entry, arguments[0]) for index, entry in enumerate(entries))
    if origin in (Mapping, FrozenMap):
        if not isinstance(value, Mapping):
            raise MismatchError(f" must be a mapping, got {_show(value)}")
        pairs = cast("Mapping[object, object]", value)
        return FrozenMap({_at("'s key", k, str): _at(f"['{k}']", v, arguments[-1]) for k, v in pairs.items()}, hint)
    return _coerce_plain(value, hint)


@functools.cache  # torch-free code asks for the same few annotations thousands of times in a search
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _coerce_plain(value: object, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(_coerce_choice(value, tuple(member.value for member in hint)))
    if isinstance(hint, type) and issubclass(hint, Value) and isinstance(value, Mapping):
        try:
            return hint.from_dict(cast("Mapping[str, Any]", value))
        except ConfigError as error:
            raise MismatchError(f": {error.message}") from error
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise MismatchError(f" must be finite, got {value}")
        try:
            return float(value)
        except OverflowError:
            raise MismatchError(" is too large for a float") from None
    if hint is type(None):
        fits = value is None
    else:
        fits = isinstance(value, hint) and (hint is not int or not isinstance(value, bool))
    if not fits:
        raise MismatchError(f" must be {_name(hint)}, got {_show(value)}")
    if hint is int and abs(cast("int", value)) > MOST_WHOLE:
        raise MismatchError(f" must be between -2^63 and 2^63, got {_show(value)}")
    return value


def _coerce_choice(value: object, choices: tuple[Any, ...]) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices) or (
        isinstance(value, enum.Enum) and value in choices
    ):
        return value
    hint = did_you_mean(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    raise MismatchError(f" is {_show(value)}, must be one of {', '.join(str(choice) for choice in choices)}{hint}")


def _coerce_union(value: object, choices: tuple[Any, ...]) -> Any:
    if value is None and type(None) in choices:
        return None
    mismatches: list[str] = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return coerce(value, choice)
        except MismatchError as mismatch:
            mismatches.append(str(mismatch))
    optional = " or None" if type(None) in choices and len(mismatches) == 1 and " must be " in mismatches[0] else ""
    raise MismatchError(" or".join(mismatches).replace(", got", f"{optional}, got"))


def freeze(value: object) -> Any:
    """Return JSON-like data with tuples for lists and ``FrozenMap`` for mappings.

    Raises:
        MismatchError: Something in it cannot be JSON.
    """
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return FrozenMap({_at("'s key", k, str): freeze(v) for k, v in pairs.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(entry) for entry in cast("list[object]", value))
    if isinstance(value, float) and not math.isfinite(value):
        raise MismatchError(f" must be finite, got {value}")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise MismatchError(f" must be plain JSON data, got {_show(value)}")


def _at(place: str, value: object, hint: Any) -> Any:
    try:
        return coerce(value, hint)
    except MismatchError as mismatch:
        raise MismatchError(f"{place}{mismatch}") from None


def _plain(value: object) -> Any:
    if isinstance(value, Value):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in cast("Mapping[str, object]", value).items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in cast("tuple[object, ...]", value)]
    return value


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return value == field.default_factory()
    return field.default is not dataclasses.MISSING and value == field.default


def _show(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**100:
        return f"a whole number of {value.bit_length()} bits"  # Python writes no number of over 4,300 digits
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(hint: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _fix_of(field: dataclasses.Field[Any], value: object, hint: Any) -> str:
    _, choices = _parts(hint)
    words = [choice for choice in choices if isinstance(choice, str)]
    if isinstance(value, str) and (close := closest_word(value, words)):
        return f"{field.name}={close}"
    return f"give {field.name} {_name(hint)}" if _is_required(field) else f"leave out {field.name}="


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: type[Value]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _fields(cls: type[Value]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cast("Any", cls))
