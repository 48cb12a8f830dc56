"""Drafts: files and directories that get their name when they are whole, and never the name of something that exists."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.durable import rename, sync_directory, told_of
from meshwright.errors import ConfigError

__all__: list[str] = []

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def refuse_existing(path: Path) -> None:
    """Raise an error if there is something of this name.

    Raises:
        ConfigError: There is.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists (rule: nothing is written over)", fix="name another path, or move it away")


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path; what the context makes there gets the path's name at its end, durably.

    The context makes a file or a directory, and syncs it. An error removes it; a killed process leaves it hidden.

    Raises:
        ConfigError: Something of that name exists, at the begin or at the end.
        StorageError: The disk fails.
    """
    refuse_existing(path)
    with told_of(path.parent, "make"):
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".draft-{secrets.token_hex(8)}-{path.name}"[:200])
    try:
        yield draft
        if draft.is_dir():
            sync_directory(draft)
            refuse_existing(path)
            rename(draft, path)  # an error where others have filled a directory of that name meanwhile
        else:
            _name_file(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        draft.unlink(missing_ok=True)
        raise


def _name_file(draft: Path, path: Path) -> None:
    # A rename would replace a file that somebody made meanwhile; a second name is refused then.
    with told_of(path, "name"):
        try:
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            refuse_existing(path)
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            refuse_existing(path)
            os.rename(draft, path)
        else:
            os.unlink(draft)
    sync_directory(path.parent)
