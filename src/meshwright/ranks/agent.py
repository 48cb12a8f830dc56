"""Ranks that torchrun's agent has started end with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final

__all__: list[str] = []

_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 30.0
"""How long a rank may take to save and end once it was asked to: as long as torchrun's agent itself would wait [s].

Source: `SubprocessContext._close` of torch/distributed/elastic/multiprocessing/api.py, 2026-11-25.
"""
_EXIT_CODE: Final = 12
_AGENT_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
_THREAD: Final = "meshwright-agent"


def follow_agent(environment: Mapping[str, str], look_s: float = _LOOK_S, patience_s: float = _PATIENCE_S) -> None:
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
        # Whoever reads the stream may have ended with the agent, or read no more: this thread must not fail or wait there.
        teller = threading.Thread(target=_tell, args=(parent,), daemon=True)
        teller.start()
        teller.join(look_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s)
        os._exit(_EXIT_CODE)

    threading.Thread(target=watch, name=_THREAD, daemon=True).start()


def _tell(parent: int) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, or None
        sys.stderr.write(f"process {parent}, which has started this rank, is gone; the rank stops\n")
