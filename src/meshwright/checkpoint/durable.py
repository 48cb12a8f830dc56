"""Files that are there after a power cut: written, synced, and only then given their name.

A name is durable when its directory has been synced, too. An error of a disk is told with the path, the bytes and what is free.
Nothing is tried again: a second fsync after a failed one may report success for data that is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshwright.errors import StorageError

__all__: list[str] = []

_AHEAD_BYTES = 32 * 2**20
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of Linux
_READ_BYTES = 1 << 26
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def told_of(path: Path, doing: str, num_bytes: int | None = None) -> Iterator[None]:
    """Raise an error of the file system inside the context as a `StorageError`.

    Args:
        path: What is read or written.
        doing: The verb for the message, "write" for example.
        num_bytes: How much is to be written, where that is known [bytes].
    """
    try:
        yield
    except OSError as error:
        needed = "" if num_bytes is None else f", {num_bytes} bytes"
        free = ""
        if error.errno in _NO_SPACE:
            with contextlib.suppress(OSError):
                free = _free_text(path.parent)
        text = f"cannot {doing} {path}{needed}: {error.strerror or error}{free}"
        raise StorageError(text, fix=_fix(error, path, doing)) from error


def _free_text(place: Path) -> str:
    """Return what is left of a file system: bytes, and files where it has a limit on them and none is left."""
    found = os.statvfs(place)
    files = "; no file more (inode) is free" if found.f_files and not found.f_favail else ""
    return f"; {found.f_bavail * found.f_frsize} bytes are free{files}"


def _fix(error: OSError, path: Path, doing: str) -> str | None:
    """Return what to do about an error of the file system; None where it is the disk's own."""
    if error.errno in _NO_SPACE:
        return f"make room on the file system of {path.parent}, or save elsewhere"
    if error.errno == errno.EROFS:
        return "mount that file system for writing, or save elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"give this user permission to {doing} {path}, or take another folder"
    if error.errno == errno.ENOTDIR or (error.errno == errno.EEXIST and doing == "make"):
        return "take another folder: this name, or one above it, is a file's"
    return None


def write_new_file(path: Path, parts: Iterable[bytes | bytearray | memoryview], num_bytes: int | None = None) -> int:
    """Write a file that does not exist yet, and sync it; its name is durable once its directory is synced.

    Args:
        path: The file.
        parts: Its contents, in order.
        num_bytes: Its size for the message of an error, where that is known [bytes].

    Returns:
        Its size [bytes].

    Raises:
        StorageError: It exists, or the disk is full or fails; what was written of it is removed.
    """
    written = started = 0
    with told_of(path, "write", num_bytes):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest:
                    count = os.write(descriptor, rest)
                    written, rest = written + count, rest[count:]
                if written - started >= _AHEAD_BYTES:
                    # The disk works while the next part is made. Only the sync below says what has arrived.
                    _writing_starter()(descriptor, started, written - started)
                    started = written
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    return written


@functools.cache
def _writing_starter() -> Callable[[int, int, int], object]:
    """Return what asks the disk to begin with (descriptor, start, bytes); it does nothing where the system has no such call."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return lambda *_: None
    return lambda descriptor, start, length: function(
        descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _START_WRITING
    )


def make_directory(path: Path) -> None:
    """Make a directory and those above it, durably, where they are not there.

    Raises:
        StorageError: It cannot be made.
    """
    with told_of(path, "make"):
        if path.is_dir():
            return
    if path.parent != path:
        make_directory(path.parent)
    with told_of(path, "make"):
        path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        StorageError: The disk fails.
    """
    with told_of(path, "sync"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or directory another name in the same directory, durably.

    Raises:
        StorageError: The name is taken by something that is not empty, or the disk fails.
    """
    with told_of(new, "rename"):
        os.rename(old, new)
    sync_directory(new.parent)


def open_regular_file(path: Path) -> int:
    """Open a file for reading and return its descriptor; links, pipes and devices are not opened.

    Raises:
        StorageError: There is none, or it is no regular file.
    """
    with told_of(path, "read"):
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(_status(path, descriptor).st_mode):
            raise StorageError(f"cannot read {path}: it is no regular file")
    except StorageError:
        os.close(descriptor)
        raise
    return descriptor


def open_own_file(path: Path, flags: int) -> int:
    """Open a regular file of this user, or make it; a symbolic link to a file of somebody's choice is not followed.

    Args:
        path: The file.
        flags: O_RDWR, or O_WRONLY with others.

    Returns:
        Its descriptor.

    Raises:
        OSError: It cannot be opened or made.
        StorageError: It is a symbolic link, is not a regular file, has a second name, or belongs to another user.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(
                f"{path} is a symbolic link (rule: a regular file)", fix=f"remove it: rm '{path}'"
            ) from None
        raise
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif status.st_nlink > 1:
        problem = f"has {status.st_nlink} names, so that another file would be written with it"
    elif status.st_uid != os.getuid() and os.getuid() != 0:
        problem = "belongs to another user"
    if problem is not None:
        os.close(descriptor)
        raise StorageError(f"{path} {problem} (rule: a regular file of its user's own)", fix=f"remove it: rm '{path}'")
    return descriptor


def size_of(path: Path, descriptor: int) -> int:
    """Return the size of an open file [bytes].

    Raises:
        StorageError: The disk fails.
    """
    return _status(path, descriptor).st_size


def _status(path: Path, descriptor: int) -> os.stat_result:
    with told_of(path, "read"):
        return os.fstat(descriptor)


def read_small_file(path: Path, most_bytes: int) -> bytes:
    """Return a file's contents.

    Raises:
        StorageError: It cannot be read, is no regular file, or is larger than allowed.
    """
    descriptor = open_regular_file(path)
    try:
        size = size_of(path, descriptor)
        if size > most_bytes:
            raise StorageError(f"cannot read {path}: it has {size} bytes (rule: at most {most_bytes})")
        return read_at(path, descriptor, 0, size)
    finally:
        os.close(descriptor)


def read_at(path: Path, descriptor: int, start: int, most: int) -> bytes:
    """Return bytes of an open file; fewer where it ends before.

    Args:
        path: The file, for messages.
        descriptor: The open file.
        start: Where they begin [bytes].
        most: How many [bytes].

    Raises:
        StorageError: It cannot be read.
    """
    data = bytearray(most)
    return bytes(memoryview(data)[: fill_from(path, descriptor, start, memoryview(data))])


def fill_from(path: Path, descriptor: int, start: int, memory: memoryview) -> int:
    """Fill memory from an open file, as far as it goes.

    Args:
        path: The file, for messages.
        descriptor: The open file.
        start: Where to begin [bytes].
        memory: What to fill.

    Returns:
        How much was read [bytes]; less than there is room for where the file ends before.

    Raises:
        StorageError: It cannot be read.
    """
    filled = 0
    with told_of(path, "read"):
        while filled < len(memory) and (count := os.preadv(descriptor, [memory[filled : filled + _READ_BYTES]], start)):
            start, filled = start + count, filled + count
    return filled
