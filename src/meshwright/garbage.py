"""Threads of one process that run at the same time: garbage collection is paused where it would block them for ever.

Python before 3.12 may collect wherever C code allocates an object, also while that code holds a lock. What is collected can hand
the interpreter to another thread, and that one may wait for this lock without handing it back. Two such locks have been met:

- `torch.get_rng_state` holds the generator's lock while it makes its result. Activation checkpointing calls it in each block.
- `sys._current_exceptions` holds the lock that each thread's start and end need (python/cpython#106883).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__: list[str] = []

_lock = threading.Lock()
_num_pauses = 0
_was_enabled = False
_is_frozen = False


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage by itself inside the context; contexts of several threads may overlap."""
    global _num_pauses, _was_enabled
    with _lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if not _num_pauses and _was_enabled:
                gc.enable()


def freeze_all() -> None:
    """Collect, and leave all objects of now out of later collections, in this process and in those that are forked from it."""
    global _is_frozen
    gc.collect()
    gc.freeze()
    _is_frozen = True


@contextlib.contextmanager
def cheap_collection() -> Iterator[None]:
    """Let `gc.collect` look only at what is made inside the context, unless somebody has frozen objects before."""
    # To count them Python walks through all of them: 60 ms in a rank whose template has imported torch.
    if _is_frozen or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
