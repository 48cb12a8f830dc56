"""Rounds: every gang takes its block in turn, and a round during which the machine did something else is taken again.

What decides is the processor time that everything else took, never the figures themselves.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
from gangs import Gang

OTHERS_LIMIT = 0.1
"""Cores that the rest of the machine may take while a round counts."""
_LOOK_S = 1.0


def order_of(round_number: int, names: list[str]) -> list[str]:
    """Rotate, and turn around every other time: no side always follows the same one."""
    shift = round_number % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated if round_number // len(names) % 2 == 0 else rotated[::-1]


def run_rounds(gangs: dict[str, Gang], *, rounds: int, steps: int, patience_s: float) -> list[dict[str, Any]]:
    """Run rounds until that many count.

    Args:
        gangs: The sides, by name.
        rounds: How many must count [count].
        steps: Timed steps of a block [count].
        patience_s: What disturbed rounds, and the waiting behind them, may take in all; once that is used up every round
            counts, disturbed or not [s].

    Returns:
        One entry a round: its blocks, what everything else took, and whether it counts.
    """
    pids = [os.getpid()] + [pid for gang in gangs.values() for pid in gang.pids]
    done: list[dict[str, Any]] = []
    num_counted = 0
    while num_counted < rounds:
        began = (time.perf_counter(), _busy_s(), _cpu_s(pids))
        blocks = {name: gangs[name].run(steps) for name in order_of(len(done), list(gangs))}
        ended = (time.perf_counter(), _busy_s(), _cpu_s(pids))
        wall, busy, own = (now - then for now, then in zip(ended, began, strict=True))
        others = (busy - own) / wall
        counts = others <= OTHERS_LIMIT or patience_s <= 0
        done.append({"counts": counts, "others_cores": others, "wall_s": wall, "blocks": blocks})
        num_counted += counts
        if not counts:
            patience_s -= wall + wait_for_quiet(patience_s - wall)
    return done


def wait_for_quiet(at_most_s: float) -> float:
    """Wait until the machine is quiet, while no gang computes; return how long that took [s]."""
    start = time.perf_counter()
    while time.perf_counter() - start < at_most_s:
        before = _busy_s()
        time.sleep(_LOOK_S)
        if _busy_s() - before <= OTHERS_LIMIT * _LOOK_S:
            break
    return time.perf_counter() - start


def _busy_s() -> float:
    """Time that this machine's cores have spent on anything, or had taken away by the host [core seconds]."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _cpu_s(pids: list[int]) -> float:
    """What these processes have used [core seconds]."""
    used = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(times.user + times.system for times in used)
