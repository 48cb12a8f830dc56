"""Damage of one checkpoint: flipped bits, other lengths, and other things in a file's place; each must be refused by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE, OpenCheckpoint
from meshwright.errors import CheckpointError, StorageError


def refusal(path: Path, file: str) -> str | None:
    """Open and check a checkpoint in which a file is damaged; return what is wrong with the answer, None if it is right."""
    try:
        with OpenCheckpoint(path) as snapshot:
            snapshot.check()
    except (CheckpointError, StorageError) as error:
        return None if file in error.message else f"another file is named: {error.message}"
    return "accepted"


@contextlib.contextmanager
def changed(path: Path, file: str) -> Iterator[bytearray]:
    """Let a file be changed in place, and put it back."""
    place = path / file
    whole = place.read_bytes()
    try:
        yield bytearray(whole)
    finally:
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        else:
            place.unlink(missing_ok=True)
        place.write_bytes(whole)


def flipped(path: Path, file: str, step: int = 1) -> Iterator[tuple[str, str | None]]:
    """Yield (bit, what is wrong with the answer) for every `step`-th bit."""
    with changed(path, file) as data:
        descriptor = os.open(path / file, os.O_WRONLY)
        for bit in range(0, 8 * len(data), step):
            os.pwrite(descriptor, bytes([data[bit // 8] ^ (1 << bit % 8)]), bit // 8)
            yield f"bit {bit}", refusal(path, file)
            os.pwrite(descriptor, data[bit // 8 : bit // 8 + 1], bit // 8)
        os.close(descriptor)


def other_lengths(path: Path, file: str, step: int = 1) -> Iterator[tuple[str, str | None]]:
    """Yield (length, what is wrong) for every `step`-th shorter length, and some longer ones."""
    with changed(path, file) as data:
        for length in [*range(len(data) - 1, -1, -step), 0]:
            os.truncate(path / file, length)
            yield f"{length} bytes", refusal(path, file)
        for more in (b"\0", b" ", b"\n", bytes(16), bytes(4096), bytes(data)):
            (path / file).write_bytes(bytes(data) + more)
            yield f"{len(more)} bytes more", refusal(path, file)


def replaced(path: Path, file: str, others: dict[str, Path]) -> Iterator[tuple[str, str | None]]:
    """Yield (what is there instead, what is wrong).

    Args:
        path: The checkpoint.
        file: The file that is replaced.
        others: Names -> other files to put there.
    """
    for kind in ("nothing", "directory", "link to itself", "link to nowhere", "pipe", "socket", "device", *others):
        with changed(path, file) as data, contextlib.ExitStack() as open_things:
            place, copy = path / file, path / "copy"
            place.unlink()
            if kind == "directory":
                place.mkdir()
            elif kind == "link to itself":
                copy.write_bytes(bytes(data))
                place.symlink_to(copy.name)
            elif kind == "link to nowhere":
                place.symlink_to("/nowhere")
            elif kind == "pipe":
                os.mkfifo(place)
            elif kind == "socket":
                open_things.enter_context(socket.socket(socket.AF_UNIX)).bind(str(place))
            elif kind == "device":
                with contextlib.suppress(PermissionError):
                    os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
            elif kind in others:
                shutil.copyfile(others[kind], place)
            # Another checkpoint's manifest is sound: it is the other files that are not those which it names.
            is_manifest = kind in others and others[kind].name == file == MANIFEST_FILE
            yield kind, refusal(path, "" if is_manifest else file)
            copy.unlink(missing_ok=True)
