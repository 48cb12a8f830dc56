"""Settings of the C library's allocator: freed memory stays with this process, but for what is needed once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

__all__: list[str] = []

# Names of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1  # the largest that an int holds
_FROM_HEAP_BYTES = 2**30
_FROM_KERNEL_BYTES = 2**20
_WORTH_A_TRIM_BYTES = 2**26  # the heap that is given back has to be faulted in again

_keeps = False
"""Whether `keep_freed_memory` is in force."""


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For the environment of a process that is to be started: its heap may lie in huge pages, where the kernel leaves the choice to
programs (transparent_hugepage is "madvise"). Weights, gradients and moments are read end to end in each step, and a page of 4
KiB takes a walk through the page tables every 4 KiB."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory instead of returning it to the kernel; tell whether it will.

    glibc takes every tensor above 32 MiB, and many smaller ones, from the kernel and returns it when it is freed. The next step
    allocates the same sizes again, and pays one fault and one page of zeros for each page. The process keeps the memory of its
    peak, as on a GPU. The user's own MALLOC_ variables take precedence.
    """
    global _keeps
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name.startswith("MALLOC_") for name in os.environ) or "_threshold" in tunables:
        return False
    _keeps = _set(_FROM_HEAP_BYTES)
    return _keeps


@contextlib.contextmanager
def memory_returned() -> Iterator[None]:
    """Have memory of a large tensor that is made inside go back to the kernel when it is freed.

    What happens once, before training, may need far more than a step: each of many threads would keep its own peak.
    """
    if not _keeps:
        yield
        return
    before = _resident_bytes()
    _set(_FROM_KERNEL_BYTES)
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None and _resident_bytes() - before > _WORTH_A_TRIM_BYTES:
            trim(0)
        _set(_FROM_HEAP_BYTES)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _set(from_kernel: int) -> bool:
    """Set the size from which memory comes from the kernel [bytes]; tell whether the C library took it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None  # musl has none
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, from_kernel) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    )
