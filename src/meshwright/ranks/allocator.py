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
_M_ARENA_MAX = -8
_NEVER = -1
_FROM_HEAP_BYTES = 2**30
_FROM_KERNEL_BYTES = 2**20
_LARGEST_KEPT_BYTES = 2**22
_WORTH_A_TRIM_BYTES = 2**26  # the heap that is given back has to be faulted in again

_from_kernel_bytes: int | None = None
"""The size from which memory comes from the kernel, once `keep_freed_memory` is in force."""


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For the environment of a process that is to be started: its heap may lie in huge pages, where the kernel leaves the choice to
programs (transparent_hugepage is "madvise"). Weights, gradients and moments are read end to end in each step, and a page of 4
KiB takes a walk through the page tables every 4 KiB."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory instead of returning it to the kernel; tell whether it will.

    glibc takes every tensor above 32 MiB, and many smaller ones, from the kernel and returns it when it is freed. The next step
    allocates the same sizes again, and pays one fault and one page of zeros for each page. The process keeps the memory of its
    peak, as on a GPU. All threads share one heap: that of a thread holds 64 MiB, and larger tensors would come from the kernel.
    The user's own MALLOC_ variables take precedence.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name.startswith("MALLOC_") for name in os.environ) or "_threshold" in tunables or "arena_" in tunables:
        return False
    return bool(_mallopt(_M_ARENA_MAX, 1)) and _set(_FROM_HEAP_BYTES)


@contextlib.contextmanager
def memory_returned() -> Iterator[None]:
    """Have memory of a large tensor that is made inside go back to the kernel when it is freed.

    What happens once, before training, may need far more than a step.
    """
    with _memory_from(_FROM_KERNEL_BYTES):
        yield


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Have freed memory kept inside, and returned at the end: for what makes tensors of the same sizes many times over.

    Those above 4 MiB go back to the kernel at once: a heap cannot give a hole to a tensor that is a little larger, and small ones
    that live on between them keep it from shrinking.
    """
    with _memory_from(_LARGEST_KEPT_BYTES):
        yield


@contextlib.contextmanager
def _memory_from(from_kernel: int) -> Iterator[None]:
    outside = _from_kernel_bytes
    if outside is None:
        yield
        return
    before = _resident_bytes()
    _set(from_kernel)
    try:
        yield
    finally:
        if _resident_bytes() - before > _WORTH_A_TRIM_BYTES:
            return_freed_memory()
        _set(outside)


def return_freed_memory() -> None:
    """Give what is free in the heap back to the kernel, before something is made that needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and _from_kernel_bytes is not None:
        trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _set(from_kernel: int) -> bool:
    """Set the size from which memory comes from the kernel [bytes]; tell whether the C library took it."""
    global _from_kernel_bytes
    is_set = bool(_mallopt(_M_MMAP_THRESHOLD, from_kernel) and _mallopt(_M_TRIM_THRESHOLD, _NEVER))
    if is_set:
        _from_kernel_bytes = from_kernel
    return is_set


def _mallopt(name: int, value: int) -> int:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None  # musl has none
    return 0 if mallopt is None else mallopt(name, value)
