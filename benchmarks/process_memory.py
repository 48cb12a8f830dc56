"""What the kernel says of this process's memory: resident now, the largest since a moment that we choose, whose pages it is.

`ru_maxrss` will not do: a process inherits its parent's across fork and exec, so a rank would report the launcher's. `VmHWM`
belongs to the memory that exec made, and writing 5 to `/proc/self/clear_refs` sets it to what is resident at that moment.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

KIB = 1024


def reset_peak() -> bool:
    """Let the peak begin anew at what is resident now; tell whether the kernel permits it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_memory() -> dict[str, int]:
    """Return this process's memory [bytes].

    "resident" is all that it has mapped and touched, "peak" the largest value that this had since `reset_peak`. "anonymous" is
    its own memory (heap and stacks); "file" is code and libraries, "shared" the segments of the shared-memory transport, both of
    which every rank counts in full. "proportional" (PSS) counts a page that n processes have mapped as 1/n of a page.
    """
    status = _fields(Path("/proc/self/status").read_text())
    return {
        "resident": status["VmRSS"],
        "peak": status["VmHWM"],
        "anonymous": status["RssAnon"],
        "file": status["RssFile"],
        "shared": status["RssShmem"],
        "proportional": _fields(Path("/proc/self/smaps_rollup").read_text())["Pss"],
    }


def _fields(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines if len(words) == 3 and words[2] == "kB"}


def give_freed_memory_back() -> bool:
    """Have the C library return to the kernel what it keeps of freed memory (malloc_trim); False where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim is not None and trim(0))
