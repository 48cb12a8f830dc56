"""Ends of ranks of a job that nobody else ends: torchrun's agent is gone, or the other ranks are."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final, NoReturn

__all__: list[str] = []

_LOOK_S: Final = 0.25
PATIENCE_S: Final = 30.0
"""How long a rank may take to save and end once it was asked to: as long as torchrun's agent itself would wait [s].

Source: `SubprocessContext._close` of torch/distributed/elastic/multiprocessing/api.py, 2026-11-25.
"""
_EXIT_CODE: Final = 12
_AGENT_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
_THREAD: Final = "meshwright-agent"


def follow_agent(environment: Mapping[str, str], look_s: float = _LOOK_S, patience_s: float = PATIENCE_S) -> None:
    """Watch the process that has started this one, where that is torchrun's: an agent that was killed tells its ranks nothing.

    A rank whose agent is gone gets SIGTERM from itself, as the agent would have sent it. One that does not end then is ended.
    The kernel's own signal at a parent's death follows the thread that has forked, and not the process.

    Args:
        environment: Variables of this process.
        look_s: Time between two looks [s].
        patience_s: How long the rank may take to end [s].
    """
    parent = os.getppid()
    if _AGENT_VARIABLE not in environment or parent <= 1:
        return
    if any(thread.name == _THREAD for thread in threading.enumerate()):  # of a join that failed before
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(look_s)
        end_this_rank(f"process {parent}, which has started this rank, is gone", patience_s)

    threading.Thread(target=watch, name=_THREAD, daemon=True).start()


def end_this_rank(why: str, patience_s: float = PATIENCE_S) -> None:
    """Ask this rank to stop, as its launcher would, and end it where it does not; from a thread beside its main one.

    Args:
        why: What has happened, for the standard error.
        patience_s: How long the rank may take to end [s].
    """
    # Whoever reads the stream may have ended with the launcher, or read no more: this thread must not fail or wait there.
    teller = threading.Thread(target=_tell, args=(why,), daemon=True)
    teller.start()
    teller.join(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience_s)
    os._exit(_EXIT_CODE)


def end_without_teardown(code: int) -> NoReturn:
    """End this process as Python would, with its exit functions, and without taking the interpreter down.

    That takes up to 0.8 s where torch is loaded, while the other ranks, or torchrun's agent, wait for this one's end; and C++
    destructors may abort the process while threads of gloo or autograd still live.

    Args:
        code: The exit code.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, None, or a full pipe that nobody reads
            stream.flush()
    os._exit(code)


def _tell(why: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, or None
        sys.stderr.write(f"{why}; the rank stops\n")
        sys.stderr.flush()
