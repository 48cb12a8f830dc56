"""A folder that is removed while it is watched."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.unit.report.made_runs import started, step

from meshwright.train.lock import Owner
from meshwright.watch.follow import RunFollower
from meshwright.watch.screen import verdict


@pytest.mark.parametrize("events", [(), (started(), step(1))], ids=["not begun", "running"])
def test_it_ends_the_watch_and_what_was_read_is_kept(tmp_path, events) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").write_text(Owner.this_process().to_line())
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    follower = RunFollower(folder)
    assert not follower.look().is_over
    shutil.rmtree(folder)
    watched = follower.look()
    assert watched.is_over
    assert "its folder is gone" in verdict(watched)
    assert len(watched.run.steps) == len(events[1:])
