"""train/events.py, train/lock.py: what stands in a run's folder cannot make a run write elsewhere."""

import os

import pytest

from meshwright.errors import StorageError
from meshwright.train.events import EVENTS_FILE, LOCK_FILE, RunDirectory


@pytest.mark.parametrize("name", [LOCK_FILE, EVENTS_FILE])
@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_planted_file_is_refused_and_its_target_stays(tmp_path, name, kind):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine, and no whole line")
    folder.mkdir()
    if kind == "link":
        (folder / name).symlink_to(victim)
    elif kind == "second name":
        (folder / name).hardlink_to(victim)
    else:
        os.mkfifo(folder / name)
    with pytest.raises(StorageError, match=r"symbolic link|2 names|not a regular file") as told:
        RunDirectory(folder)
    assert str(folder / name) in str(told.value.fix)
    assert victim.read_text() == "mine, and no whole line"
    (folder / name).unlink()  # the fix
    with RunDirectory(folder) as directory:
        directory.write_event({"event": "stopped", "time": 0.0, "step": 1})


def test_a_link_to_a_file_that_is_not_there_makes_none(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / EVENTS_FILE).symlink_to(tmp_path / "made")
    with pytest.raises(StorageError, match="symbolic link"):
        RunDirectory(folder)
    assert not (tmp_path / "made").exists()


def test_a_link_in_place_of_the_checkpoints_is_followed_where_it_is_ones_own(tmp_path, monkeypatch):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large disk")
    with RunDirectory(tmp_path / "run") as directory:
        directory.try_checkpoints()
    if os.getuid() == 0:  # whom everybody trusts: the link is to be somebody else's
        os.chown(tmp_path / "run" / "checkpoints", 12345, -1, follow_symlinks=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(StorageError, match="checkpoints is a symbolic link of another user"):
        RunDirectory(tmp_path / "run")


def test_a_folder_that_everybody_can_write_is_told_of(tmp_path):
    with RunDirectory(tmp_path / "run") as directory:
        assert not directory.doubt
        directory.path.chmod(0o777)
        assert "every user can write into" in directory.doubt
        directory.path.chmod(0o1777)  # others cannot rename what is not theirs
        assert not directory.doubt
