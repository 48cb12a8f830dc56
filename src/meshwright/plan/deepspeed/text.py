"""Text of a DeepSpeed configuration: JSON with comments and trailing commas.

DeepSpeed parses its file with hjson. Of hjson's extensions this reads those that such files use: comments (`#`, `//`, `/* */`),
commas before a closing bracket, and a byte order mark. They are replaced by blanks, so that an error's line and column are the
file's, and Python's JSON parser reads the rest. Unquoted keys and strings, single quotes and files without the outer braces are
errors. So are duplicate keys, as for DeepSpeed.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from meshwright.errors import ConfigError
from meshwright.texts import parse_json

__all__: list[str] = []

_MOST_DIGITS = 18
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|/\*.*?\*/|//[^\n]*|#[^\n]*", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def parse_text(text: str, name: str) -> dict[str, Any]:
    """Return the object that a file holds.

    Args:
        text: The file's text.
        name: What to call it in an error.

    Raises:
        ConfigError: It is not JSON, not an object, or gives a key twice.

    >>> parse_text('{"a": [1, 2,], /* why */ "b": "# no comment", } // end', "ds.json")
    {'a': [1, 2], 'b': '# no comment'}
    """
    plain = _blank(_TRAILING_COMMA, _blank(_COMMENT, text.removeprefix("\ufeff")))
    try:
        loaded: object = parse_json(
            plain, most_digits=_MOST_DIGITS, object_pairs_hook=lambda pairs: _unique(pairs, name)
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}: not JSON at line {error.lineno}, column {error.colno}: {error.msg} (rule: JSON; comments and trailing "
            "commas pass)",
            fix="write keys and text in double quotes, and everything between one { and its }",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name}: expected a JSON object, got {type(loaded).__name__}", fix="{ ... } around it")
    return cast("dict[str, Any]", loaded)


def is_saved_value(entries: dict[str, Any]) -> bool:
    """Tell a file that Meshwright wrote, such as a saved plan, from others: it says its format.

    >>> is_saved_value({"format": "meshwright.plan", "version": 1, "dp": 2}), is_saved_value({"train_batch_size": 8})
    (True, False)
    """
    return str(entries.get("format", "")).startswith("meshwright.")


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Replace what a pattern finds by spaces; strings, which it finds too, stay."""
    return pattern.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ConfigError(
                f'{name}: "{key}" is given twice in one object, as {json.dumps(entries[key])} and as {json.dumps(value)} '
                "(rule: each key once)",
                fix=f'keep one "{key}"',
            )
        entries[key] = value
    return entries
