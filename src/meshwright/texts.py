"""Texts from outside: files and JSON read within limits, and control characters removed before something is shown.

A file that a user names may be a pipe that nobody writes to, a device without an end, or JSON with a number of a thousand digits.
Each is an error with a reason here, in milliseconds, rather than a wait or another exception further on.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

__all__: list[str] = []

MOST_BYTES: Final = 64 * 2**20
"""Largest file that `read_text` takes, unless its caller sets another limit [bytes]."""
MOST_DIGITS: Final = 300
"""Digits of a whole number in JSON, unless the caller sets another limit: a float holds a few more [count]."""
MOST_NESTING: Final = 100
"""Objects and lists in one another in JSON [count]."""

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Whole escape sequences first, then what is left of control characters, and what turns the direction of text.
_ESCAPE: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


def clean(text: object) -> str:
    r"""Return text without control characters, so that a name or a message from outside cannot steer the terminal.

    Line breaks and tabs stay; half a surrogate pair, which no terminal can be sent, becomes a question mark.

    >>> clean("a\x1b[31mb\x07")
    'ab'
    """
    return _SURROGATE.sub("?", _CONTROL.sub("", _ESCAPE.sub("", str(text))))


def _escaped(text: object) -> str:
    from html import escape  # what is printed needs no tables of entities

    return escape(clean(text))


def html_block(title: str, *parts: str) -> str:
    """Return parts of HTML under a title, for a notebook.

    Args:
        title: Text, which is escaped.
        *parts: HTML.
    """
    return f"<div><p><b>{_escaped(title)}</b></p>{''.join(parts)}</div>"


def html_table(head: Sequence[object], rows: Iterable[Sequence[object]], *, most: int = 200) -> str:
    """Return a table as HTML, every cell as text.

    Args:
        head: The columns' names.
        rows: Cells of each row.
        most: Rows that are shown; others are counted [count].

    >>> html_table(["a"], [["<b>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    found = [list(row) for row in rows]
    shown = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in found[:most])
    more = f"<p>{len(found) - most} more rows are not shown</p>" if len(found) > most else ""
    names = "".join(f"<th>{_escaped(name)}</th>" for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{shown}</tbody></table>{more}"


def html_text(text: object) -> str:
    """Return text as a block of HTML that keeps its lines."""
    return f"<pre>{_escaped(text)}</pre>"


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Args:
        path: The file. A symbolic link is followed: the user named it.
        most_bytes: The largest size that is read [bytes].

    Raises:
        OSError: It cannot be opened, is not a regular file, is too large, or is not UTF-8; `strerror` says which.
    """
    return decode(read_bytes(path, most_bytes=most_bytes), path)


def decode(data: bytes, path: str | os.PathLike[str]) -> str:
    """Return a file's bytes as text.

    Raises:
        OSError: They are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: byte {error.start} is {data[error.start]:#04x}"
        raise OSError(errno.EILSEQ, what, str(path)) from None


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, flags: int = 0) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        most_bytes: The largest size that is read [bytes].
        flags: Further flags of `os.open`, for example O_NOFOLLOW.

    Raises:
        OSError: As `read_text`.
    """
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, f"not a valid file name: {error}", str(path)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for matches, name in _KINDS if matches(status.st_mode)), "not a regular file")
            number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            raise OSError(number, f"it is {kind} (rule: a regular file)", str(path))
        parts, size = [], 0
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
            size += len(part)
            if size > most_bytes:
                held = max(size, status.st_size)
                raise OSError(errno.EFBIG, f"it has {held} bytes or more (rule: at most {most_bytes})", str(path))
        return b"".join(parts)
    finally:
        os.close(descriptor)


def is_file(path: Path) -> bool:
    """Tell whether there is a regular file; False also where the name is not valid or cannot be looked up."""
    return _holds(path, stat.S_ISREG)


def is_directory(path: Path) -> bool:
    """Tell whether there is a directory; False also where the name is not valid or cannot be looked up."""
    return _holds(path, stat.S_ISDIR)


def _holds(path: Path, matches: Callable[[int], bool]) -> bool:
    try:
        return matches(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def parse_json(
    text: str,
    *,
    most_digits: int = MOST_DIGITS,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return what JSON text holds, within limits of digits and nesting.

    Args:
        text: The text.
        most_digits: Digits of a whole number [count].
        object_pairs_hook: As of `json.loads`.

    Raises:
        ValueError: It is not JSON, or beyond a limit, or has half a surrogate pair.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    import json  # most commands read none

    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > MOST_NESTING:
            raise ValueError(
                f"objects and lists are nested more than {MOST_NESTING} deep (rule: at most {MOST_NESTING})"
            )

    def parse_int(digits: str) -> int:
        if len(digits) > most_digits:
            raise ValueError(f"a number has {len(digits)} digits: {digits[:10]}... (rule: at most {most_digits})")
        return int(digits)

    loaded = json.loads(text, parse_int=parse_int, object_pairs_hook=object_pairs_hook)
    refuse_surrogates(loaded)
    return loaded


def refuse_surrogates(value: object) -> None:
    r"""Raise where a text inside cannot be written to a file.

    Raises:
        ValueError: A text has half a surrogate pair, as "\ud800" or an argument that is not UTF-8 makes one.
    """
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            if match := _SURROGATE.search(found):
                raise ValueError(f"a text has half of a surrogate pair, {match[0]!r}, which is not a character")
        elif isinstance(found, dict):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple)):
            pending += found
