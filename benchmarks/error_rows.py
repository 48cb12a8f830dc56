"""Exceptions as rows of results: what a verdict needs of one, and its text without the folders of a machine."""

from __future__ import annotations

import re
from typing import Any

import meshwright as mw

_FOLDERS = re.compile(r"/[^\s\"']*?/(?=(?:src/meshwright|benchmarks|examples|tests|site-packages|lib/python3)\b)")


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return what a verdict needs of an exception."""
    return {
        "type": type(error).__name__,
        "message": str(getattr(error, "message", error)),
        "fix": getattr(error, "fix", None),
        "is_ours": isinstance(error, mw.MeshwrightError),
        "exit_code": getattr(error, "exit_code", None),
        "is_hang": isinstance(error, mw.LostPeerError),
    }


def without_folders(text: str) -> str:
    """Return a text with the folders before a checkout and before installed packages cut off its paths.

    >>> without_folders('File "/home/me/checkout/src/meshwright/mesh.py", line 3')
    'File "src/meshwright/mesh.py", line 3'
    """
    return _FOLDERS.sub("", text)
