"""What every test shares: the header, and the checks that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # ranks import test modules by the names that pytest gives them: tests.parity.test_x

os.environ.setdefault("MESHWRIGHT_CLUSTER", "none")  # no test measures the machine, but for those that say so
os.environ.setdefault("PYTHONHASHSEED", "random")  # walks through sets are found where ranks differ

# Ignored signals are inherited, from nohup and from shells' background jobs, and heeded. Tests send these themselves.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

_PATIENCE_S = 5.0  # for threads that are about to end
_HAS_LISTS = Path(f"/proc/self/task/{os.getpid()}/children").exists()  # of a process's children, by the kernel

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


@pytest.hookimpl(trylast=True)  # of what the options and -k have left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that mostly wait, for deadlines and for processes, stand evenly between those that compute."""
    waiting = [item for item in items if item.nodeid.startswith("tests/faults/")]
    others = [item for item in items if not item.nodeid.startswith("tests/faults/")]
    if waiting and others:
        places = [(number * len(others) / len(waiting), 0, item) for number, item in enumerate(waiting)]
        places += [(float(number), 1, item) for number, item in enumerate(others)]
        items[:] = [item for *_, item in sorted(places, key=lambda place: place[:2])]


@pytest.hookimpl(optionalhook=True)  # pytest alone, without xdist, knows no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a scope to one of the workers, as if they were one test, and the others as usual."""
    from tests.scopes import scope_of
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Have the collector of cycles skip what was imported to collect the tests: half a million objects, which stay."""
    gc.collect()
    gc.freeze()


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_SET_BY_LIBRARIES)}


def _default_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _children(of: int) -> list[int]:
    """Return a process's children from the kernel's lists: microseconds; a look through all processes takes milliseconds."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{of}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{of}/task/{thread}/children").read_bytes().split())
    return found


def _pool_pids() -> set[int]:
    """Return the pool's processes; the process that only hands out tests imports no pool, and with it no torch."""
    pool = sys.modules.get("meshwright.testing.pool")
    return set() if pool is None else pool.pool_pids()


def _descendants() -> set[int]:
    """Return all processes below this one, but for the pool's and what those have started."""
    of_pool = _pool_pids()
    if not _HAS_LISTS:
        below = psutil.Process().children(recursive=True)
        return {child.pid for child in below if of_pool.isdisjoint((child.pid, *(p.pid for p in child.parents())))}
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        children = set(_children(waiting.pop())) - found - of_pool
        found |= children
        waiting += children
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves variables, threads, process groups or processes; those of the rank pool are to stay."""
    environment, threads, before = _environment(), _threads(), _descendants()
    pool_before = _pool_pids()
    had_group = _default_group_exists()
    yield
    changed = {key for key, value in _environment().items() if environment.get(key) != value}
    changed |= environment.keys() - _environment().keys()
    assert not changed, f"environment variables were changed: {sorted(changed)}"
    assert _default_group_exists() == had_group, "a process group was left behind (or taken away)"
    pool_changed = _pool_pids() != pool_before
    # The pool's own threads come with its processes.
    left = set() if pool_changed else {t for t in _threads() - threads if not t.daemon}
    for thread in left:
        thread.join(timeout=_PATIENCE_S)
    still = [thread.name for thread in left if thread.is_alive()]
    assert not still, f"threads were left behind: {still}"
    processes = _strangers(_descendants() - before)
    assert not processes, f"processes were left behind: {processes}"


def _strangers(pids: set[int]) -> dict[int, str]:
    """Return the command lines of those that live and are not Python's own."""
    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            command = " ".join(process.cmdline()[:6])
        except psutil.NoSuchProcess:
            continue
        # Python keeps its resource tracker for the life of the process.
        if not is_dead and "resource_tracker" not in command:
            found[pid] = command
    return found


@pytest.fixture(autouse=True, scope="session")
def pools_are_closed() -> Iterator[None]:
    """Stop the ranks that tests have shared, and fail if one of them is still there."""
    from tests.scopes import FOR_RANKS

    from meshwright.testing import pool

    pool.preload(*FOR_RANKS)
    yield
    pids = pool.pool_pids()
    pool.close_pools()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    del gone
    assert not alive, f"ranks of the pool are still alive: {[process.pid for process in alive]}"
