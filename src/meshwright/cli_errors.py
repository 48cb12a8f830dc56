"""Errors of the command line: one message, and an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import ConfigError, MeshwrightError, StorageError, exit_code_of
from meshwright.texts import clean

__all__: list[str] = []

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def run_command(run: Callable[[], object]) -> None:
    """Run the command of this process and exit with its code: an error of ours is one message, without a traceback."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a stream of another kind
        # A name need not exist in the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    try:
        for argument in sys.argv[1:]:
            if match := _CONTROL.search(argument):
                why = f"an argument has the control character {match[0]!r}: {argument!r}"
                raise ConfigError(why, fix="leave it out")
        run()
    except MeshwrightError as error:
        print(clean(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Who reads the output has gone, as `head` does; the interpreter would flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(StorageError.exit_code)
    except Exception as error:  # noqa: BLE001 - of the user's code
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list(
            [frame for frame in told.stack if not _is_of_commands(frame.filename)]
        )
        print(clean("".join(told.format())), file=sys.stderr)
        sys.exit(exit_code_of(error))


def refuse_unwritable(option: str, path: Path | None) -> None:
    """Raise StorageError where a file of results cannot be written, before the work whose results they are.

    Args:
        option: The option that names it.
        path: The file; what is in it stays. None: there is none.
    """
    if path is None:
        return
    try:
        was_there = path.exists()
        with path.open("a"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise StorageError(
            f"{option} {path} cannot be written: {error.strerror}", fix=f"{option} with a file in a folder of your own"
        ) from error


def _is_of_commands(file: str) -> bool:
    """Tell whether a file is of what reads command lines, which says nothing about an error of the user's code."""
    path = Path(file)
    is_ours = path.parent == Path(__file__).parent and path.stem.startswith(("cli", "__main__"))
    return is_ours or not {"typer", "click"}.isdisjoint(path.parts)
