"""A run that is watched from outside, for real: going on, with a rank that stands still, and after a kill of its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import trace_format
from tests.faults.command import ROOT
from tests.faults.jobs import trained
from tests.faults.test_resumed import BATCH, CONFIG, SEED

from meshwright.report.run_files import read_run
from meshwright.report.step_picture import picture_step
from meshwright.spec import rank_states
from meshwright.train.data.order import epoch_order
from meshwright.watch.follow import RunFollower, WatchedRun
from meshwright.watch.screen import verdict

DEADLINE_S = 60.0
STANDS_STILL_AT = 6


def until(
    is_wanted: Callable[[WatchedRun], bool], follower: RunFollower, process: subprocess.Popen[bytes]
) -> WatchedRun:
    """Look at a run until it is as wanted; each look is a tenth of a second after the one before, or at the process's end."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_wanted(watched := follower.look()):
        assert time.monotonic() < deadline, verdict(watched)
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        assert is_wanted(follower.look()), "it has ended"
    return watched


@pytest.mark.long
def test_a_run_is_watched_while_it_stands_still_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_states, "LEAST_LATE_S", 1.0)  # five seconds would be waited for
    order = epoch_order(trained.NUM_SAMPLES, SEED, 0, shuffle=True)
    (tmp_path / "harm").write_text(f"{int(order[STANDS_STILL_AT * BATCH - 1])} signal SIGSTOP")
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", "c.toml", "--trace", "2-3", "--set", "train.log=['csv']"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first, second = (RunFollower(tmp_path / "runs" / "run") for _ in range(2))
    try:
        watched = until(lambda one: bool(one.late), first, process)
        assert (watched.outcome, watched.late, watched.is_over) == ("running", (1,), False)
        assert "The others wait for rank 1 (load, stopped (SIGSTOP or a debugger), no progress for" in verdict(watched)
        assert second.look().late == (1,)
        assert list(watched.run.steps.steps) == list(range(1, STANDS_STILL_AT))
        assert watched.states is not None
        pids = [one.pid for one in watched.states.ranks]
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    for follower in (first, second):
        watched = follower.look()
        assert watched.is_over
        assert "killed: its launching process is gone and told no end; the last step that it told is 5" in verdict(
            watched
        )
        assert watched.late == (1,)
        assert [one.pid for one in watched.states.ranks] == pids if watched.states else False
    assert len((tmp_path / "runs" / "run" / "metrics.csv").read_text().splitlines()) == STANDS_STILL_AT
    assert json.loads((tmp_path / "runs" / "run" / "ranks.json").read_text())["limit_s"] is None
    # What was traced before it is there, and is drawn.
    assert trace_format.check_file(tmp_path / "runs" / "run" / "trace.json") == []
    picture = picture_step(read_run(tmp_path / "runs" / "run"))
    assert picture is not None
    assert [row[0] for row in picture.steps] == ["2", "3"]
    assert [lane.label for lane in picture.lanes] == ["rank 0", "rank 1"]
    assert all(any(box.kind == "load" for box in lane.boxes) for lane in picture.lanes)
