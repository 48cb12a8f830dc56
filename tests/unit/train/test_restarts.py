"""train/restarts.py: which failures are tried again, how often, and when it is no accident any more."""

import os
import signal
import threading
import time

import pytest

from meshwright.errors import (
    ApplyError,
    CheckpointError,
    ConfigError,
    CorruptionError,
    InternalError,
    LostPeerError,
    NonFiniteError,
    PlanError,
    StoppedOnRequest,
    StorageError,
    UserCodeError,
    WorkerKilledError,
)
from meshwright.train.failures import one_line
from meshwright.train.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, Restarts, wait


def killed(rank=1, pid=100):
    return WorkerKilledError(f"rank {rank} of 2 (pid {pid}) was killed by SIGKILL at step 7", rank=rank)


def after(restarts, error, **progress):
    return restarts.after(error, told=one_line(error), **progress)


@pytest.mark.parametrize(
    ("error", "new_steps", "is_tried"),
    [
        (killed(), 0, True),
        (LostPeerError("rank 1 waits for 300 s"), 0, True),
        (OSError("stale file handle"), 3, True),
        (UserCodeError("rank 1 raised Odd", rank=1), 3, True),
        (OSError("stale file handle"), 0, False),
        (UserCodeError("rank 1 raised Odd", rank=1), 0, False),
        (ConfigError("no"), 3, False),
        (ApplyError("no"), 3, False),
        (PlanError("no"), 3, False),
        (StorageError("full"), 3, False),
        (CheckpointError("damaged"), 3, False),
        (NonFiniteError("NaN"), 3, False),
        (CorruptionError("differs"), 3, False),
        (InternalError("a bug"), 3, False),
        (StoppedOnRequest("asked"), 3, False),
        (KeyboardInterrupt(), 3, False),
        (SystemExit(1), 3, False),
    ],
)
def test_what_is_tried_again(error, new_steps, is_tried):
    assert (Restarts(5).after(error, told="x", step=7, num_new_steps=new_steps).pause_s is not None) == is_tried
    assert Restarts(0).after(error, told="x", step=7, num_new_steps=new_steps).pause_s is None


def test_the_same_cause_at_one_step_is_tried_twice():
    restarts = Restarts(100)
    assert after(restarts, killed(1, 100), step=7, num_new_steps=2).pause_s is not None
    assert after(restarts, killed(0, 200), step=7, num_new_steps=2).pause_s is not None  # another rank, the same cause
    decision = after(restarts, killed(1, 300), step=7, num_new_steps=2)
    assert decision.pause_s is None
    assert "3 times after step 7" in decision.reason


def test_another_cause_or_step_is_counted_by_itself():
    restarts = Restarts(100)
    for step in range(5):
        for error in (killed(), LostPeerError("it waits"), OSError("one"), OSError("two")):
            for _ in range(2):
                assert after(restarts, error, step=step, num_new_steps=1).pause_s is not None


def test_pauses_double_up_to_a_limit_and_the_number_is_held():
    restarts = Restarts(9)
    pauses = [after(restarts, killed(), step=step, num_new_steps=1).pause_s for step in range(9)]
    assert pauses == [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number) for number in range(9)]
    decision = after(restarts, killed(), step=10, num_new_steps=1)
    assert (decision.pause_s, restarts.num_done) == (None, 9)
    assert "train.max_restarts = 9 are used up" in decision.reason


def test_a_signal_ends_the_pause():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert not wait(0.001)
    for number in (signal.SIGTERM, signal.SIGINT):
        began = time.monotonic()
        timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
        threading.Thread(target=timer.run).start()
        assert wait(60.0)
        assert time.monotonic() - began < 30
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
