"""Which tests share what takes seconds to make, and run on one worker therefore."""

from __future__ import annotations

__all__: list[str] = []


def is_hugging_face(nodeid: str) -> bool:
    """Tell whether a test's ranks import `transformers`."""
    return "[hf_" in nodeid or "test_hugging_face.py" in nodeid


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that a test runs with, or its own.

    Each worker has pools of its own, whose ranks would import `transformers`, and would make its own comparison.
    """
    if is_hugging_face(nodeid):
        return "hugging_face"
    return "comparison" if "docs/test_compare.py" in nodeid else nodeid
