"""Check of a DeepSpeed configuration's keys: each must be known, of the right type, and one that can be honoured (`keys.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import did_you_mean
from meshwright.plan.deepspeed.keys import ALIASES, BLOCKS, FREE_BLOCKS, KEYS, REFUSED, REFUSED_IF_ENABLED, Key
from meshwright.values import Problems

__all__: list[str] = []

AUTO = "auto"

_MOST_WHOLE = 10**18

COMMENT_MARKS = ("_", "//", "#")


def flatten(entries: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return dotted key -> value of all that is given, in the file's order; a block stands before its keys.

    Old spellings are replaced, whole numbers written as 1e9 become whole, and null counts as not given. "auto" stays.

    Args:
        entries: The file's object.
        problems: Collects keys that are unknown, of another type, or cannot be honoured.

    >>> flatten({"bfloat16": {"enabled": True}, "train_batch_size": 1e3}, Problems("ds.json"))
    {'bf16': {'enabled': True}, 'bf16.enabled': True, 'train_batch_size': 1000}
    """
    values: dict[str, Any] = {}
    _walk(entries, "", values, problems)
    return values


def show(value: object) -> str:
    """Return a value in the file's notation.

    >>> show(True), show("auto"), show([0.9, 0.95])
    ('true', '"auto"', '[0.9, 0.95]')
    """
    return json.dumps(value)


def fragment(dotted: str, value: object) -> str:
    """Return the part of a file that sets a key, as it can be pasted.

    >>> fragment("zero_optimization.stage", 1)
    '"zero_optimization": {"stage": 1}'
    """
    *blocks, last = dotted.split(".")
    text = f'"{last}": {show(value)}'
    for block in reversed(blocks):
        text = f'"{block}": {{{text}}}'
    return text


def _walk(entries: Mapping[str, Any], prefix: str, values: dict[str, Any], problems: Problems) -> None:
    for name, value in entries.items():
        dotted = ALIASES.get(f"{prefix}{name}", f"{prefix}{name}")
        if dotted in values:
            problems.add(f'"{prefix}{name}" and "{dotted}" are one key', fix=f'leave out "{prefix}{name}"')
        elif dotted == "zero_optimization" and isinstance(value, bool):
            values["zero_optimization.stage"] = int(value)  # the spelling of before 2020
        elif dotted == "zero_optimization.cpu_offload":
            values["zero_optimization.offload_optimizer.device"] = "cpu" if value is True else "none"
        elif dotted in FREE_BLOCKS and isinstance(value, Mapping):
            values |= {f"{dotted}.{key}": entry for key, entry in value.items() if entry is not None}
        elif dotted in BLOCKS:
            if isinstance(value, Mapping):
                values[dotted] = value
                _walk(value, f"{dotted}.", values, problems)
            elif value is not None:
                problems.add(f'"{dotted}" is {show(value)} (rule: an object)', fix=f'leave out "{dotted}"')
        elif dotted in KEYS:
            _take(dotted, KEYS[dotted], value, values, problems)
        elif dotted in REFUSED_IF_ENABLED or dotted in REFUSED:
            _take_feature(dotted, value, values, problems)
        elif not prefix and name.startswith(COMMENT_MARKS):
            values[dotted] = value
        else:
            _add_unknown(name, prefix, problems)


def _take(dotted: str, key: Key, value: Any, values: dict[str, Any], problems: Problems) -> None:
    if value is None and dotted != "steps_per_print":
        return
    if (
        isinstance(value, float)
        and value.is_integer()
        and abs(value) < _MOST_WHOLE
        and key.kind in ("positive", "count", "whole")
    ):
        value = int(value)
    rule = None if value == AUTO or value is None else _broken_rule(key, value)
    if rule is not None:
        better = key.default if key.default is not None else 1
        problems.add(f'"{dotted}" is {show(value)} (rule: {rule})', fix=fragment(dotted, better))
    elif key.only and value not in (AUTO, key.default):
        problems.add(
            f'"{dotted}" is {show(value)}, which cannot be honoured: {key.only}',
            fix=f'leave out "{dotted}"' if key.default is None else fragment(dotted, key.default),
        )
    else:
        values[dotted] = value


def _broken_rule(key: Key, value: Any) -> str | None:
    """Return the rule that a value breaks, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    is_whole = is_number and isinstance(value, int)
    rules = {
        "positive": (is_whole and value >= 1, "a whole number, at least 1"),
        "count": (is_whole and value >= 0, "a whole number, at least 0"),
        "whole": (is_whole, "a whole number"),
        "number": (is_number and value >= 0, "a number, at least 0"),
        "switch": (isinstance(value, bool), "true or false"),
        "text": (isinstance(value, str), "text"),
        "list": (isinstance(value, list), "a list"),
        "any": (True, ""),
    }
    holds, rule = rules[key.kind]
    return None if holds else rule


def _take_feature(dotted: str, value: Any, values: dict[str, Any], problems: Problems) -> None:
    """Accept a block for a feature that does not exist here, if it is switched off."""
    is_on = _enables(value) if dotted in REFUSED_IF_ENABLED else value not in (None, False, {})
    if is_on:
        why = REFUSED_IF_ENABLED.get(dotted) or REFUSED[dotted]
        problems.add(f'"{dotted}" cannot be honoured: {why}', fix=f'leave out "{dotted}"')
    elif value is not None:
        values[dotted] = value


def _enables(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is True or any(_enables(entry) for entry in value.values() if entry is not True)
    return value is True


def _add_unknown(name: str, prefix: str, problems: Problems) -> None:
    known = [
        key.removeprefix(prefix).split(".")[0] for key in (*KEYS, *ALIASES, *FREE_BLOCKS) if key.startswith(prefix)
    ]
    if not prefix:
        known += [*REFUSED_IF_ENABLED, *REFUSED]
    # Keys in the wrong block are a common mistake in such files.
    elsewhere = [key for key in KEYS if key.split(".")[-1] == name]
    hint = f" (it belongs to {elsewhere[-1]})" if 1 <= len(elsewhere) <= 2 else did_you_mean(name, known)
    problems.add(f'unknown key "{prefix}{name}"{hint}', fix=f'leave out "{prefix}{name}"')
