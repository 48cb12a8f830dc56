"""Memory of large tensors: kept by a rank for its next step, and given back where it is needed once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, sys, torch
from pathlib import Path
from meshwright.ranks.allocator import keep_freed_memory, memory_kept, memory_returned

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if not keep_freed_memory():
    sys.exit("skip")
torch.set_num_threads(1)
before = resident()
contexts = {"returned": [memory_returned], "kept inside": [memory_returned, memory_kept], "kept": []}[sys.argv[1]]
with contextlib.ExitStack() as stack:
    for context in contexts:
        stack.enter_context(context())
    held = [torch.ones(2**19) for _ in range(64)]
    del held
    print(resident() - before)
print(resident() - before)
again = [torch.ones(2**19) for _ in range(64)]
del again
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own settings")
@pytest.mark.parametrize("kind", ["kept", "returned", "kept inside"])
def test_large_tensors_go_back_to_the_kernel_only_inside(kind: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if done.stderr.strip() == "skip":
        pytest.skip("this C library has no such settings")
    assert done.returncode == 0, done.stderr
    inside, at_end, after = map(int, done.stdout.split())
    size = 64 * 2**21
    assert (inside < size // 4) == (kind == "returned")
    assert (at_end < size // 4) == (kind != "kept")
    assert after > size // 2  # what is freed outside stays with the process
