"""A wait is remarkable where it is longer than the ranks' own steps explain."""

from __future__ import annotations

import dataclasses
import math

from meshwright.ranks.heartbeat import Beat
from meshwright.ranks.pace import LEAST_S, LEAST_STEPS, TIMES_A_STEP, Pace

BEAT = Beat(-1, "run", 0.0, 0.0, "", 0, 0, 0, 0, 0, "")


def paced(step_s: float, num_steps: int, *, at_a_time: int = 1) -> tuple[Pace, float]:
    """Return the pace of two ranks that have stepped, and the time then."""
    pace, now = Pace(2), 100.0
    for step in range(0, num_steps + 1, at_a_time):
        pace.note([dataclasses.replace(BEAT, step=step)] * 2, now)
        now += step_s * at_a_time
    return pace, now


def test_there_is_no_pace_before_some_steps() -> None:
    pace, now = paced(0.1, LEAST_STEPS // 2 - 1)
    assert pace.limit_s == math.inf
    assert not pace.is_late(now, now + 1e6)


def test_a_wait_of_several_of_the_slowest_steps_is_told_once() -> None:
    pace, now = paced(2.0, 30)
    assert pace.limit_s == 2.0 * TIMES_A_STEP
    assert not pace.is_late(now, now + 9.9)
    assert pace.is_late(now, now + 10.1)
    assert not pace.is_late(now, now + 20.0)
    assert pace.is_late(now + 30.0, now + 50.0)


def test_short_steps_leave_a_least_wait() -> None:
    assert paced(0.001, 200, at_a_time=50)[0].limit_s == math.inf  # four looks at each of two ranks
    assert paced(0.001, 500, at_a_time=10)[0].limit_s == LEAST_S


def test_a_slow_step_counts_and_a_new_call_does_not() -> None:
    pace, now = paced(1.0, 150)
    pace.note([dataclasses.replace(BEAT, step=151)] * 2, now + 60.0)
    assert pace.limit_s == TIMES_A_STEP  # one of a hundred and fifty
    pace.note([BEAT] * 2, now + 100.0)
    pace.note([dataclasses.replace(BEAT, step=0)] * 2, now + 500.0)
    assert pace.limit_s == TIMES_A_STEP
