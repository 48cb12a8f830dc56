"""F05, F06: requests to stop, to the launching process and to single ranks, once and twice, heeded and not."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.faults import leaks
from tests.faults.command import Command, launching
from tests.faults.jobs import rank_jobs
from tests.scopes import FULL_GRID

from meshwright.ranks.launch import RankGroup
from meshwright.ranks.supervisor import Supervisor


def test_signals_while_finished_ranks_leave_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, numbers = Supervisor._turn, [signal.SIGTERM, signal.SIGINT]

    def interrupted(supervisor: Supervisor, timeout_s: float) -> None:
        if supervisor._is_leaving and numbers:
            signal.raise_signal(numbers.pop())
        turn(supervisor, timeout_s)

    with RankGroup(2) as group:
        assert group.submit(rank_jobs.identity, 5) == [5, 5]
        monkeypatch.setattr(Supervisor, "_turn", interrupted)
    assert not numbers
    assert group.is_closed


def wait_until_running(command: Command, num: int) -> dict[int, dict[str, object]]:
    lines = command.read_until(lambda line: "event" in line and "running" in line["event"], num)
    return {line["rank"]: line["event"] for line in lines}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP] if FULL_GRID else [signal.SIGHUP])
def test_one_signal_stops_all_ranks_at_the_same_step(number: signal.Signals) -> None:
    with launching("loop_until_stopped", 2, True) as command:
        wait_until_running(command, 2)
        command.process.send_signal(number)
        assert command.finish() == 0
    steps = command.lines[-1]["results"]
    assert steps[0] == steps[1] >= 3


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    with launching("loop_until_stopped", 3) as command:
        running = wait_until_running(command, 3)
        os.kill(int(str(running[1]["pid"])), signal.SIGTERM)
        assert command.finish() == 0
    steps = command.lines[-1]["results"]
    assert steps[0] == steps[1] == steps[2] >= 3


def test_a_signal_during_the_start_stops_at_the_first_step() -> None:
    with launching("loop_until_stopped", 2) as command:
        command.read_until(lambda line: "started" in line)
        # The handlers are in place before the first rank is born, so the birth is the moment to signal.
        until = time.monotonic() + 30
        while not list_children(command.process.pid) and time.monotonic() < until:
            pass
        command.process.send_signal(signal.SIGTERM)
        assert command.finish() == 0
    assert command.lines[-1]["results"] == [0, 0]


def list_children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_a_second_ctrl_c_ends_it_at_once(watch: leaks.Watch) -> None:
    with launching("deaf", 2, 1) as command:
        wait_until_running(command, 2)
        start = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        # Rank 0 returns at the first; that is not told to this test, so the second comes when the handler has run.
        wait_for_pending(command.process.pid, signal.SIGINT)
        command.process.send_signal(signal.SIGINT)
        assert command.finish() == 130
        assert time.monotonic() - start < 2.0
    assert command.lines[-1]["error"] == "KeyboardInterrupt"


def wait_for_pending(pid: int, number: int) -> None:
    """Return when a signal is no longer pending: two of a kind count as one until the first has been taken."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        if not (int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) >> (number - 1) & 1:
            return


def test_a_rank_that_does_not_react_is_named_and_killed() -> None:
    with launching("deaf", 2, 1, stop_grace_s=1.0) as command:
        wait_until_running(command, 2)
        start = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        assert command.finish() == 75, command.lines[-1]
        assert 1.0 <= time.monotonic() - start < 4.0
    last = command.lines[-1]
    assert last["error"] == "StoppedOnRequest"
    assert "SIGTERM asked for a stop" in last["text"]
    assert "rank 1, phase run; it stands in:" in last["text"]
    assert "in deaf" in last["text"]
    assert "rank 0" not in last["text"]
