"""What every test shares: the header, and the checks that a test leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.testing import pool

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # ranks import test modules by the names that pytest gives them: tests.parity.test_x

# What tests of ranks import, and what an optimizer imports when it is made (torch._dynamo).
_FOR_RANKS = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "meshwright.train.comparison",
    "transformers",
)

# Set by libraries when they are first imported or used, once in a process.
_SET_BY_LIBRARIES = (
    "PYTEST_",
    "TORCH",
    "PYTORCH",
    "KINETO",
    "TOKENIZERS",
    "HF_",
    "KMP_",
    "OMP_",
    "MKL_",
    "TRITON",
    "COLUMNS",
)


def pytest_report_header() -> str:
    """Name the versions that the results hold for."""
    return f"torch {importlib.metadata.version('torch')}, python {sys.version.split()[0]}, {os.cpu_count()} cores"


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_SET_BY_LIBRARIES)}


def _default_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline()[:6])
        except psutil.NoSuchProcess:
            continue
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves variables, threads, process groups or processes; those of the rank pool are to stay."""
    environment, threads, children = _environment(), _threads(), _children()
    pool_before = pool.pool_pids()
    had_group = _default_group_exists()
    yield
    changed = {key for key, value in _environment().items() if environment.get(key) != value}
    changed |= environment.keys() - _environment().keys()
    assert not changed, f"environment variables were changed: {sorted(changed)}"
    assert _default_group_exists() == had_group, "a process group was left behind (or taken away)"
    pool_changed = pool.pool_pids() != pool_before
    # The pool's own threads come with its processes.
    left = set() if pool_changed else {t for t in _threads() - threads if not t.daemon}
    for thread in left:
        thread.join(timeout=5)
    still = [thread.name for thread in left if thread.is_alive()]
    assert not still, f"threads were left behind: {still}"
    new = {pid: line for pid, line in _children().items() if pid not in children}
    of_pool = _descendants(pool.pool_pids())
    processes = {pid: line for pid, line in new.items() if pid not in of_pool and not _is_tracker(line)}
    assert not processes, f"processes were left behind: {processes}"


def _descendants(pids: set[int]) -> set[int]:
    found = set(pids)
    for pid in pids:
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


def _is_tracker(command: str) -> bool:
    return "resource_tracker" in command  # Python keeps one for the life of the process


@pytest.fixture(autouse=True, scope="session")
def pools_are_closed() -> Iterator[None]:
    """Stop the ranks that tests have shared, and fail if one of them is still there."""
    pool.preload(*_FOR_RANKS)
    yield
    pids = pool.pool_pids()
    pool.close_pools()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    del gone
    assert not alive, f"ranks of the pool are still alive: {[process.pid for process in alive]}"
