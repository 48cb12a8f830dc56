"""Settings of the C library's allocator: freed memory stays with this process."""

from __future__ import annotations

import ctypes
import os
import sys

__all__: list[str] = []

# Names of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1  # the largest that an int holds
_FROM_HEAP_BYTES = 2**30


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
    if not sys.platform.startswith("linux"):
        return False
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name.startswith("MALLOC_") for name in os.environ) or "_threshold" in tunables:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
