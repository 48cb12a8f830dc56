"""The command `meshwright checkpoint verify`: every digest of every checkpoint in a place, file by file."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from meshwright.checkpoint.blocks import check_blocks, num_blocks
from meshwright.checkpoint.durable import read_small_file
from meshwright.checkpoint.listing import printable
from meshwright.checkpoint.manifest import MOST_BYTES, FileEntry, Manifest
from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE, open_file
from meshwright.checkpoint.step_directories import find_steps, refuse_other_name
from meshwright.errors import CheckpointError, StorageError
from meshwright.units import format_bytes

__all__: list[str] = []

Result: TypeAlias = Literal["sound", "damaged", "unreadable"]
_DAMAGE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
"""Errors of a file that says nothing of the disk: it is gone, or something else stands in its place."""


class CheckedFile(NamedTuple):
    """A file of a checkpoint, and what was found of it."""

    path: Path
    result: Result
    text: str
    """Its size, or what is wrong."""


def verify_checkpoints(path: Path, *, step: int | None = None) -> int:
    """Check all digests, and show each file with its result. A checkpoint that is deleted meanwhile does not count.

    Args:
        path: One step's directory, a directory of steps, of which all are checked, or a run's directory.
        step: Only this step of them.

    Returns:
        The exit code: 14 where a file is damaged, 13 where one cannot be read and none is damaged, else 0.

    Raises:
        CheckpointError: There is no checkpoint.
        StorageError: The place cannot be read.
    """
    steps = find_steps(path, step)
    results: list[Result] = []
    num_gone = 0
    for place in steps:
        for found in check_step(place, is_named=place != path):
            if found.result != "sound" and place != path and not os.path.lexists(place):
                # A run that goes on saving there keeps the newest ones alone. What is deleted loses its name first.
                sys.stdout.write(f"{'gone':<10}  {printable(place)}  it was deleted meanwhile\n")
                num_gone += 1
                break
            results.append(found.result)
            sys.stdout.write(f"{found.result:<10}  {printable(found.path)}  {printable(found.text)}\n")
            sys.stdout.flush()
    bad = [result for result in results if result != "sound"]
    number = len(steps) - num_gone
    counts = f"{number} checkpoint{'s' * (number != 1)}, {len(results)} files: "
    sys.stdout.write(counts + (f"{len(bad)} damaged or unreadable\n" if bad else "all sound\n"))
    if "damaged" in bad:
        return CheckpointError.exit_code
    return StorageError.exit_code if bad else 0


def check_step(path: Path, *, is_named: bool) -> Iterator[CheckedFile]:
    """Yield each file of a checkpoint with its result; without a sound manifest no other file is known.

    Args:
        path: The checkpoint's directory.
        is_named: Whether its name must be that of its step.
    """
    where = path / MANIFEST_FILE
    manifest: Manifest | None = None

    def read_manifest() -> int:
        nonlocal manifest
        data = read_small_file(where, MOST_BYTES)
        found = Manifest.from_bytes(data, str(where))
        if is_named:
            refuse_other_name(path, found)
        manifest = found
        return len(data)

    yield _checked(where, read_manifest)
    for file in () if manifest is None else manifest.files:
        yield _check_file(path, file)


def _check_file(directory: Path, file: FileEntry) -> CheckedFile:
    def check() -> int:
        descriptor, table = open_file(directory, file)
        try:
            check_blocks(directory / file.name, descriptor, table, range(num_blocks(file.num_bytes)))
        finally:
            os.close(descriptor)
        return file.num_bytes

    return _checked(directory / file.name, check)


def _checked(path: Path, check: Callable[[], int]) -> CheckedFile:
    try:
        return CheckedFile(path, "sound", format_bytes(check()))
    except CheckpointError as error:
        return CheckedFile(path, "damaged", error.message)
    except StorageError as error:
        cause = error.__cause__
        is_damage = not isinstance(cause, OSError) or cause.errno in _DAMAGE
        return CheckedFile(path, "damaged" if is_damage else "unreadable", error.message)
