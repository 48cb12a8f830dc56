"""Ranks that are forked from a process that has imported torch: like interpreters of their own, or not forked at all."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.jobs import rank_jobs as jobs

from meshwright.ranks import spawning
from meshwright.ranks.launch import launch


@pytest.mark.long
def test_a_forked_rank_finds_what_one_of_its_own_interpreter_finds(
    monkeypatch: pytest.MonkeyPatch, own_template: None
) -> None:
    monkeypatch.setenv("LONG", "x" * 3000)
    template = spawning.TemplateProcess({**os.environ, "OMP_NUM_THREADS": "1"})  # has not the run's own variables
    template.hear(60)

    def ways() -> Iterator[list[dict[str, Any]]]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        yield launch(jobs.circumstances, 2, env={"MY_OWN": "7"})
        monkeypatch.setattr(spawning, "can_fork", lambda: False)
        yield launch(jobs.circumstances, 2, env={"MY_OWN": "7"})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])

    forked, executed = ways()
    monkeypatch.setattr(spawning, "kept", [template])
    kept = launch(jobs.circumstances, 2, env={"MY_OWN": "7"})
    template.dismiss()
    for rank in range(2):
        assert forked[rank] == executed[rank]
        assert executed[rank]["program"] == [*sys.argv, sys.executable]
        assert executed[rank]["shown"] == f"{rank}/2"
        assert executed[rank]["death signal"] == signal.SIGKILL
        assert executed[rank]["variables"]["MY_OWN"] == "7"
        own = {name for name in os.environb if name.startswith(b"MESHWRIGHT_")}
        assert executed[rank]["shown variables"] == dict.fromkeys(own | {b"MESHWRIGHT_RUN_ID"}, True)
        different = {"masks"}  # it was started before SIGUSR2 was blocked
        assert {**kept[rank], **{name: forked[rank][name] for name in different}} == forked[rank]


@pytest.mark.long
def test_ranks_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    template = spawning.TemplateProcess(dict(os.environ), ("numpy.random",))
    template.hear(60)
    monkeypatch.setattr(spawning, "kept", [template])
    first, second = launch(jobs.draw, 2)
    template.dismiss()
    assert not set(first) & set(second)


@pytest.mark.long
def test_ranks_are_not_forked_from_a_process_that_has_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A debugger's, a profiler's, a monitor's, started by what Python imports first.
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(spawning, "kept", [])
    template = spawning.TemplateProcess(dict(os.environ))
    template.hear(60)
    template.dismiss()
    assert template.refusal == "the import has left 1 threads, which a forked process has not"
    assert launch(jobs.identity, 2, 5) == [5, 5]


def test_ranks_of_tests_hash_a_string_differently() -> None:
    # Or a walk through a set, which has the same order on all ranks by chance, would look right.
    first, second, third = launch(jobs.hash_of, 3, "weight")
    assert first == third != second
