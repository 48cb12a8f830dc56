"""F01, F02, F07: ranks and the launching process die, by every way, at every phase."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time

import psutil
import pytest
from benchmarks.faults.kill_any_instant import one
from tests.faults import leaks
from tests.faults.command import launching
from tests.faults.jobs import joined_jobs
from tests.faults.jobs import rank_jobs as jobs
from tests.faults.killer import Killer, find, is_rank, is_template
from tests.scopes import FULL_GRID

from meshwright.errors import WorkerKilledError, exit_code_of
from meshwright.ranks.launch import RankGroup, launch

SEEDS = 20
LIMIT_S = 3.0


def check_kill(watch: leaks.Watch, seed: int, last_s: float) -> None:
    source = random.Random(seed)
    num = source.choice([2, 2, 3])
    rank = source.choice([0, 1, num - 1])
    delay_s = source.uniform(0.0, last_s)
    print(f"seed {seed}: rank {rank} of {num}, {delay_s:.3f} s after its birth")
    killer = Killer(watch, is_rank(rank, num), delay_s)
    killer.start()
    with pytest.raises(WorkerKilledError) as caught:
        launch(jobs.loop_until_stopped, num)
    took_s = time.monotonic() - killer.killed_at
    killer.join()
    assert (caught.value.rank, caught.value.signal_name) == (rank, "SIGKILL"), str(caught.value)
    assert f"rank {rank} of {num} (pid " in str(caught.value)
    assert took_s < LIMIT_S
    assert exit_code_of(caught.value) == 11


@pytest.mark.parametrize("seed", range(6, SEEDS if FULL_GRID else 14))
def test_kill_a_rank_at_a_random_instant(watch: leaks.Watch, seed: int) -> None:
    # Instants from the fork over the rendezvous into the training loop.
    check_kill(watch, seed, 0.4)


def test_the_benchmark_of_kills_at_any_instant_runs() -> None:
    """It gave the killer a rank and a number of ranks, which takes what tells the process now."""
    found = one(2)  # rank 0 of 2 after 0.34 s
    assert found["passed"], found


@pytest.mark.usefixtures("no_template")
@pytest.mark.parametrize("seed", range(6 if FULL_GRID else 2))
def test_kill_a_rank_of_its_own_interpreter_at_a_random_instant(watch: leaks.Watch, seed: int) -> None:
    # Instants from the interpreter's start over the import of torch and the rendezvous into the training loop.
    check_kill(watch, seed, 1.8)


@pytest.mark.usefixtures("own_template")
@pytest.mark.parametrize("delay_s", [0.0, 0.5] if FULL_GRID else [0.0])
def test_ranks_start_on_their_own_where_the_template_dies_before_it_is_ready(
    watch: leaks.Watch, delay_s: float
) -> None:
    killer = Killer(watch, is_template, delay_s)
    killer.start()
    assert launch(jobs.identity, 2, 5) == [5, 5]
    killer.join()
    assert killer.killed_at > 0


@pytest.mark.usefixtures("own_template")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_kill_what_the_ranks_were_forked_from(watch: leaks.Watch, number: signal.Signals) -> None:
    with RankGroup(2) as group:
        assert group.submit(jobs.identity, 5) == [5] * 2
        template = find(watch, is_template)
        assert template is not None
        start = time.monotonic()
        os.kill(template, number)
        with pytest.raises(WorkerKilledError) as caught:
            group.submit(jobs.loop_until_stopped)
        assert time.monotonic() - start < LIMIT_S
    assert f"the 2 ranks were forked from (pid {template}) was killed by {number.name}" in str(caught.value)


@pytest.mark.usefixtures("own_template")
def test_a_stop_signal_to_every_process_of_the_run_stops_the_ranks_at_the_same_step(watch: leaks.Watch) -> None:
    # Batch systems signal every process of a job: what ranks were forked from must not end them by its own end.
    signalled: set[int] = set()

    def ask(rank: int, event: dict[str, object]) -> None:
        if not signalled:
            signalled.update(pid for pid, command in watch.processes().items() if "reaper" not in command)
            for pid in signalled:
                os.kill(pid, signal.SIGTERM)

    steps = launch(jobs.loop_until_stopped, 2, on_event=ask)
    assert len(signalled) == 3
    assert steps[0] == steps[1] >= 3


@pytest.mark.parametrize(("num", "victim"), [(2, 0), (3, 2)])
def test_kill_a_rank_inside_an_all_reduce(num: int, victim: int) -> None:
    killed_at: list[float] = []

    def kill(rank: int, event: dict[str, object]) -> None:
        if event["victim"]:
            # The victim has said that it goes in; its record shows when it is in.
            until = time.monotonic() + 10
            while not group._supervisor._board.read(rank).is_waiting and time.monotonic() < until:
                pass
            killed_at.append(time.monotonic())
            os.kill(group.pids[rank], signal.SIGKILL)

    with RankGroup(num, on_event=kill) as group:
        with pytest.raises(WorkerKilledError) as caught:
            group.submit(jobs.wait_inside, victim)
        assert time.monotonic() - killed_at[0] < LIMIT_S
        assert group.is_closed
    assert caught.value.rank == victim
    assert "step 5, phase backward" in str(caught.value)
    assert "likely out of memory" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "how", "signal_name", "status"),
    [
        (0, "SIGKILL", "SIGKILL", None),
        (1, "SIGSEGV", "SIGSEGV", None),
        (0, "abort", "SIGABRT", None),
        (0, "exit 0", None, 0),
        (1, "exit 0", None, 0),
    ],
)
def test_a_rank_dies_in_its_first_call(rank: int, how: str, signal_name: str | None, status: int | None) -> None:
    with pytest.raises(WorkerKilledError) as caught:
        launch(jobs.die, 2, rank, how)
    error = caught.value
    assert (error.rank, error.signal_name, error.exit_status) == (rank, signal_name, status)
    assert "step 2, phase forward" in str(error)
    assert exit_code_of(error) == 11


def test_a_rank_that_dies_while_ranks_join_their_shares_is_named_with_the_step() -> None:
    with pytest.raises(WorkerKilledError) as caught:
        launch(joined_jobs.train, 2, "dp=2", 1, 2)
    assert (caught.value.rank, exit_code_of(caught.value)) == (1, 11)
    assert "step 2, phase shares" in str(caught.value)


def test_a_rank_that_closes_its_descriptors_is_named() -> None:
    # What it returns cannot be sent, and the launching process sees no end: a thread that reads keeps the socket alive.
    with pytest.raises(WorkerKilledError) as caught:
        launch(jobs.close_descriptors, 2, 1)
    assert (caught.value.rank, caught.value.exit_status) == (1, 70)
    assert "step 3, phase forward" in str(caught.value)


@pytest.mark.usefixtures("own_template")
def test_how_a_rank_died_is_known_where_the_caller_ignores_the_ends_of_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(WorkerKilledError) as caught:
            launch(jobs.die, 2, 1, "SIGSEGV")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGSEGV")


def test_a_rank_that_died_between_two_calls_is_noticed_at_the_next() -> None:
    with RankGroup(2) as group:
        assert group.submit(jobs.identity, 5) == [5, 5]
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerKilledError) as caught:
            group.submit(jobs.train, 100000)
    assert caught.value.rank == 1
    assert "phase idle" in str(caught.value) or "phase run" in str(caught.value)


@pytest.mark.parametrize(
    ("whom", "delay_s"), [("template", 0.0), ("template", 0.4), ("rank", 0.0), ("rank", 0.05), ("run", 0.0)]
)
def test_kill_the_launching_process(watch: leaks.Watch, whom: str, delay_s: float) -> None:
    # "run": in the middle of the run, with a forked child and one in a session of its own under each rank.
    with launching("loop_until_stopped", 2, True) as command:
        if whom == "run":
            lines = command.read_until(lambda line: "event" in line, 2)
            pids = [pid for line in lines for pid in [line["event"]["pid"], *line["event"]["grandchildren"]]]
            assert len(pids) == 6
            assert all(psutil.pid_exists(pid) for pid in pids)
        else:
            assert find(watch, is_template if whom == "template" else is_rank(1, 2)) is not None
            threading.Event().wait(delay_s)
        command.process.kill()
        command.process.wait()
    took_s = watch.assert_nothing_left(within_s=2.0)
    print(json.dumps({"whom": whom, "delay_s": delay_s, "gone_after_s": round(took_s, 3)}))
