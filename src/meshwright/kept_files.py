"""Files kept between runs in the private cache directory: written whole or not at all, and read only as they were written.

The last line of a kept file is the digest of the rest. A file that was cut by a loss of power, was changed, belongs to another
user or is a symbolic link is an error with a reason; its owner makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from meshwright.texts import read_bytes

__all__: list[str] = []

_SEAL: Final = b"\nsha256 "
_SEAL_BYTES: Final = len(_SEAL) + 64 + 1
_MOST_BYTES: Final = 2**28


def keep_file(path: Path, data: bytes) -> None:
    """Write a file that `read_kept_file` reads; one that was there is replaced, and never seen in part.

    Args:
        path: The file, in a directory of this user alone.
        data: What it is to hold.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.write(_SEAL + hashlib.sha256(data).hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())  # before its name: a name without its bytes is what a loss of power leaves
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def read_kept_file(path: Path) -> bytes:
    """Return what `keep_file` wrote.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, is a symbolic link, is or can be written by another user, or is not as it was written.
    """
    sealed = read_bytes(path, most_bytes=_MOST_BYTES, flags=os.O_NOFOLLOW)
    refuse_foreign(path)
    data, seal = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
    if seal != _SEAL + hashlib.sha256(data).hexdigest().encode() + b"\n":
        raise OSError(errno.EBADMSG, "it is damaged: its digest differs", str(path))
    return data


def refuse_foreign(path: Path) -> None:
    """Refuse a file that is a symbolic link, or that another user has or may write.

    Raises:
        OSError: It is.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to, or can be written by, another user", str(path))
