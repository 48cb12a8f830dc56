"""Where ranks are forked from a template, and who is spared when a run is swept."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.ranks import reaper, spawning


def test_ranks_are_forked_on_linux_where_no_driver_of_an_accelerator_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawning, "_DRIVERS", (str(tmp_path / "none"),))
    assert spawning.can_fork() == (sys.platform == "linux")
    monkeypatch.setattr(spawning, "_DRIVERS", (str(tmp_path / "none"), str(tmp_path)))
    assert not spawning.can_fork()


@pytest.mark.skipif(sys.platform != "linux", reason="a run's processes are found by /proc")
def test_who_reaps_the_others_is_spared() -> None:
    run_id = secrets.token_hex(16)
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"],
            env={**os.environ, reaper.RUN_ID_VARIABLE: run_id},
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    assert reaper.sweep(run_id, set(), spared={processes[0].pid}) == []
    assert processes[1].wait(5) == -9
    assert processes[0].poll() is None
    assert reaper.sweep(run_id, set()) == []
    assert processes[0].wait(5) == -9
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
