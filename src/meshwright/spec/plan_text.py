"""One-line form of a plan: keys, presets, and the filling of devices by a preset."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshwright.errors import ConfigError, closest_word, did_you_mean
from meshwright.units import parse_bytes, print_bytes_exactly
from meshwright.values import Problems

__all__: list[str] = []

_OF_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ddp", "dp_replicate"), "dp={n}"),
    **dict.fromkeys(("fsdp", "fsdp2", "dp_shard"), "dp={n},zero=3"),
}
"""Name of other tools for a degree -> the keys that it is written with here."""

_NAMES_OF_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ddp", "dp"), "distributed"),
    **dict.fromkeys(("fsdp", "fsdp2"), "zero3"),
    "tp": "tensor",
    "pp": "pipeline",
}
"""Word that stands for a plan elsewhere -> the preset that means it here."""


def _parse_int(text: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise ValueError("must be a whole number")
    return int(text)


_SWITCHES: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("on", "true", "1", "yes"), True),
    **dict.fromkeys(("off", "false", "0", "no"), False),
}


def _parse_switch(text: str) -> bool:
    if text not in _SWITCHES:
        raise ValueError("must be on or off")
    return _SWITCHES[text]


def _parse_bytes_word(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError:
        raise ValueError("must be a size, as in 25MiB") from None


# In the order in which str(plan) writes them.
_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "mode": str,
    "dp": _parse_int,
    "tp": _parse_int,
    "pp": _parse_int,
    "cp": _parse_int,
    "zero": _parse_int,
    "shard": _parse_int,
    "micro_batches": _parse_int,
    "schedule": str,
    "virtual": _parse_int,
    "sequence_parallel": _parse_switch,
    "recompute": str,
    "precision": str,
    "compress": str,
    "overlap": _parse_switch,
    "offload": str,
    "batch": str,
    "micro_batch_size": _parse_int,
    "bucket_bytes": _parse_bytes_word,
    "whole_below": _parse_bytes_word,
}

_KEY: Final = re.compile(rf"\b({'|'.join(_PARSERS)}) *=")

_DEGREES: Final = ("dp", "tp", "pp", "cp")

# Hybrid stops giving factors of two to tp and pp here: a tp group should stay on one host's fastest links, and a
# pipeline's bubble grows with its length. What is left goes to dp.
_LARGEST_HYBRID_DEGREE: Final = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """The meaning of a preset's name.

    Args:
        sets: Keys that the name settles; giving another value is an error.
        fills: Degrees that take the devices which are left.
        reason: Why, for the plan's ``reasons``.
    """

    sets: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    fills: tuple[str, ...] = ()
    reason: str | None = None


PRESETS: Final[Mapping[str, _Preset]] = {
    "single": _Preset(sets={"mode": "ranks", "dp": 1, "tp": 1, "pp": 1, "cp": 1}),
    "data_parallel": _Preset(sets={"mode": "data_parallel"}, fills=("dp",)),
    "model_parallel": _Preset(sets={"mode": "model_parallel"}, fills=("pp",)),
    "distributed": _Preset(sets={"mode": "ranks"}, fills=("dp",)),
    "zero1": _Preset(sets={"mode": "ranks", "zero": 1}, fills=("dp",)),
    "zero2": _Preset(sets={"mode": "ranks", "zero": 2}, fills=("dp",)),
    "zero3": _Preset(sets={"mode": "ranks", "zero": 3}, fills=("dp",)),
    "tensor": _Preset(sets={"mode": "ranks"}, fills=("tp",)),
    "pipeline": _Preset(sets={"mode": "ranks"}, fills=("pp",)),
    "hybrid": _Preset(sets={"mode": "ranks"}, fills=("tp", "pp", "dp")),
    "auto": _Preset(
        sets={"mode": "ranks"},
        fills=("dp",),
        reason="auto: data parallel over all devices (distributed); mw.make_plans and `meshwright train` choose by cost",
    ),
}


def parse_line(text: str) -> tuple[str | None, dict[str, Any]]:
    """Split a plan's line into its preset, if the first word is one, and its keys with their values.

    Raises:
        ConfigError: A preset, a key or a value is unknown, or a key is repeated; all of them are reported at once.

    >>> parse_line("zero1, micro_batches = 2")
    ('zero1', {'micro_batches': 2})
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without a type checker
        raise ConfigError(f"plan: expected text, got {text!r}", fix="write it as in 'dp=2,tp=2'")
    problems = Problems("plan")
    words = [word.strip() for word in text.split(",")]
    preset: str | None = None
    if words == [""]:
        raise ConfigError("plan: the text is empty", fix="write 'single', or as in 'dp=2,tp=2'")
    meant = list(words)
    if words[0] and "=" not in words[0]:
        preset = words[0]
        meant[0] = _meant_preset(preset)
        hint = did_you_mean(preset, PRESETS)
        problems.require(preset in PRESETS, f"unknown preset '{preset}'{hint}; known: {', '.join(PRESETS)}")
    entries: dict[str, Any] = {}
    for number, word in enumerate(words):
        if number == 0 and preset is not None:
            continue
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            first = f"; a preset comes first: '{word},...'" if word in PRESETS else ""
            problems.add(f"'{word}' is no key=value{first}" if word else "there is an empty entry between commas")
            meant[number] = _meant_preset(word) if word and closest_word(word, PRESETS) is None else ""
            meant[0] = f"{word},{meant[0]}" if first and preset is None else meant[0]
        elif key not in _PARSERS:
            start = key.partition(" ")[0]
            first = f"; a preset stands alone before a comma: '{start},...'" if start in PRESETS else ""
            hint = first or ("" if key.lower() in _OF_OTHERS else did_you_mean(key, _PARSERS))
            problems.add(f"unknown key '{key}'{hint}; known: {', '.join(_PARSERS)}")
            meant[number] = f"{start},{word.removeprefix(start).strip()}" if first else _meant_key(key, value)
        elif key in entries:
            problems.add(f"'{key}' is given twice")
            meant[number] = ""
        elif _KEY.search(value):
            problems.add(f"'{word}' (rule: commas separate keys)")
            meant[number] = _with_commas(word)
        else:
            entries[key] = None
            try:
                entries[key] = _PARSERS[key](value)
            except ValueError as error:
                problems.add(f"{key}='{value}' {error}")
                meant[number] = f"{key}={_meant_value(key, value)}"
    if problems:
        problems.suggest(_line_that_works(",".join(word for word in meant if word)))
    problems.check()
    return preset, entries


def _line_that_works(line: str) -> str:
    """Return the fix of a line: what was probably meant, or what its own fix says where it is wrong too."""
    try:
        parse_line(line)
    except ConfigError as error:  # each correction leaves one mistake less in a word
        return error.fix or ""
    return f"write '{line}'"


def _meant_preset(word: str) -> str:
    """Return what a word without a value stands for; "" where that cannot be known."""
    if word in PRESETS:
        return word
    degree = re.fullmatch(rf"({'|'.join(_DEGREES)}|zero)[ :]?([0-9]{{1,9}})", word)
    return (
        f"{degree[1]}={degree[2]}"
        if degree
        else _NAMES_OF_OTHERS.get(word.lower()) or closest_word(word, PRESETS) or ""
    )


def _meant_key(key: str, value: str) -> str:
    if (own := _OF_OTHERS.get(key.lower())) is not None and value.isdecimal():
        return own.format(n=value)
    close = closest_word(key, _PARSERS)
    return f"{close}={value}" if close else ""


def _meant_value(key: str, value: str) -> str:
    """Return a value that the key takes, near to one that it does not take."""
    parser = _PARSERS[key]
    if parser is _parse_switch:
        return closest_word(value, _SWITCHES) or "on"
    if parser is _parse_bytes_word:
        return "25MiB"
    try:
        return str(min(max(round(float(value)), 1), 10**6))
    except (ValueError, OverflowError):
        return "1" if key == "zero" else "2"


def _with_commas(text: str) -> str:
    """Return keys that are separated by something else with commas between them."""
    starts = [*(found.start() for found in _KEY.finditer(text)), len(text)]
    return ",".join(text[start:end].strip(" ,;|+") for start, end in itertools.pairwise(starts))


def format_line(entries: Mapping[str, Any]) -> str:
    """Return the line of these keys, in the canonical order; "single" for none.

    >>> format_line({"zero": 1, "dp": 2, "overlap": False})
    'dp=2,zero=1,overlap=off'
    """
    words: list[str] = []
    for key in _PARSERS:
        if key in entries:
            value = entries[key]
            if isinstance(value, bool):
                value = "on" if value else "off"
            elif _PARSERS[key] is _parse_bytes_word:
                value = print_bytes_exactly(value)
            words.append(f"{key}={value}")
    return ",".join(words) or "single"


def resolve_preset(name: str, entries: Mapping[str, Any], num_devices: int | None) -> dict[str, Any]:
    """Return the keys that a preset stands for, together with those given.

    Args:
        name: A preset's name.
        entries: The keys given with it.
        num_devices: The devices to fill, or None for degrees of 1 [count].

    Raises:
        ConfigError: A key contradicts the preset, or the given degrees do not divide the devices.

    >>> resolve_preset("zero1", {"tp": 2}, 8)
    {'mode': 'ranks', 'zero': 1, 'dp': 4, 'tp': 2}
    """
    preset = PRESETS[name]
    problems = Problems("plan")
    for key, value in preset.sets.items():
        given = entries.get(key, value)
        fix = f"write '{format_line(dict(entries))}'" if preset.fills == () else f"leave out {key}="
        problems.require(given == value, f"{key}={given} with the preset '{name}', which means {key}={value}", fix=fix)
    problems.check()
    resolved: dict[str, Any] = {**preset.sets}
    open_axes = [axis for axis in preset.fills if axis not in entries]
    given = math.prod(max(entries.get(axis, 1), 1) for axis in _DEGREES)
    if num_devices is not None and open_axes:
        if num_devices % given:
            degrees = ",".join(f"{axis}={entries[axis]}" for axis in _DEGREES if axis in entries)
            raise ConfigError(
                f"plan: '{name}' with {degrees}: {given} does not divide {num_devices} devices "
                "(rule: the degrees multiply to the number of devices)",
                fix=f"use {math.ceil(num_devices / given) * given} devices",
            )
        resolved |= _fill(open_axes, num_devices // given, entries)
    resolved |= entries
    if name in ("pipeline", "hybrid") and resolved.get("pp", 1) > 1:
        # Two micro-batches a stage leave a bubble below a third: (p - 1) / (2 p + p - 1).
        resolved.setdefault("micro_batches", 2 * resolved["pp"])
    if preset.reason is not None:
        resolved["reasons"] = (preset.reason,)
    return resolved


def _fill(axes: list[str], num_devices: int, given: Mapping[str, Any]) -> dict[str, int]:
    """Spread devices over axes: factors of two in turn to the smallest degree, the rest to dp or the last axis."""
    if len(axes) == 1:
        return {axes[0]: num_devices}
    rest_axis = "dp" if "dp" in axes else axes[-1]
    degrees = dict.fromkeys(axes, 1)
    while num_devices % 2 == 0:
        open_axes = [axis for axis in axes if axis == rest_axis or degrees[axis] < _LARGEST_HYBRID_DEGREE]
        degrees[min(open_axes, key=lambda axis: degrees[axis])] *= 2
        num_devices //= 2
    degrees[rest_axis] *= num_devices
    return {axis: degree for axis, degree in degrees.items() if axis not in given}
