"""Temporary directory in memory, where the host has one there: a campaign makes thousands of saves."""

from __future__ import annotations

import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def memory_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a context that makes a directory and removes it."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
