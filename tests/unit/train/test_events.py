"""train/events.py: lines that can be read back, a record that is never half there, one run for each folder."""

import json
import os
import subprocess
import sys

import pytest

from meshwright.errors import DirectoryInUseError, StorageError
from meshwright.spec import Measurement, Plan, RunRecord
from meshwright.train.events import RunDirectory, read_events


def test_events_are_lines_that_are_there_at_once(tmp_path):
    with RunDirectory(tmp_path / "runs" / "a") as directory:
        directory.write_event({"event": "run_started", "name": "zwei\nZeilen"})
        directory.write_event({"event": "step", "loss": float("nan"), "grad_norm": float("inf"), "extra": (1, 2)})
        lines = (tmp_path / "runs" / "a" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1]) == {"event": "step", "loss": None, "grad_norm": None, "extra": [1, 2]}


def test_a_second_run_is_appended_and_read_alone(tmp_path):
    for loss in (1.0, 2.0):
        with RunDirectory(tmp_path) as directory:
            directory.write_event({"event": "run_started"})
            directory.write_event({"event": "step", "loss": loss})
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 4
    assert [event.get("loss") for event in read_events(tmp_path)] == [None, 2.0]


def test_a_run_that_was_continued_has_each_step_once(tmp_path):
    def life(kind, steps, **fields):
        with RunDirectory(tmp_path) as directory:
            directory.write_event({"event": kind, **fields})
            for step in steps:
                directory.write_event({"event": "step", "step": step, "life": kind})
                directory.write_event({"event": "evaluated", "step": step})

    life("run_started", [1, 2, 3, 4])
    life("resumed", [3, 4, 5], step=2)
    found = read_events(tmp_path)
    assert [(e["step"], e["life"]) for e in found if e["event"] == "step"] == [
        *((1, "run_started"), (2, "run_started")),
        *((3, "resumed"), (4, "resumed"), (5, "resumed")),
    ]
    assert [e["step"] for e in found if e["event"] == "evaluated"] == [1, 2, 3, 4, 5]
    life("run_started", [1])
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "step"] == [1]


def test_the_folder_of_checkpoints_is_tried_and_set_aside(tmp_path):
    with RunDirectory(tmp_path) as directory:
        assert directory.set_checkpoints_aside() is None
        directory.try_checkpoints()
        assert os.listdir(tmp_path / "checkpoints") == []
        assert not directory.has_checkpoints
        assert directory.set_checkpoints_aside() is None  # nothing of value is in it
        assert not directory.has_steps
        (tmp_path / "checkpoints" / "step-00000001").mkdir()
        assert directory.has_checkpoints
        assert directory.set_checkpoints_aside() == tmp_path / "checkpoints.1"
        assert os.listdir(tmp_path / "checkpoints.1") == ["step-00000001"]
        assert not directory.has_checkpoints
        directory.write_event({"event": "step", "step": 1})
        assert directory.has_steps


def test_events_of_a_former_run_are_set_aside(tmp_path):
    for number in (1, 2):
        with RunDirectory(tmp_path) as directory:
            assert directory.set_events_aside() == (tmp_path / "events.1.jsonl" if number == 2 else None)
            assert directory.set_events_aside() is None
            directory.write_event({"event": "step", "step": number})
    assert [event["step"] for event in read_events(tmp_path)] == [2]
    assert [event["step"] for event in read_events(tmp_path / "events.1.jsonl")] == [1]


def test_a_folder_of_checkpoints_that_cannot_be_synced_is_a_storage_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    with RunDirectory(tmp_path) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(StorageError, match=r"checkpoints/\.probe-.*: Input/output error"):
                directory.try_checkpoints()
        assert os.listdir(tmp_path / "checkpoints") == []


def test_the_next_event_does_not_join_an_unfinished_line(tmp_path):
    path = tmp_path / "events.jsonl"
    for before in ('{"event": "run_started"}\n{"event": "st', '{"ev', "", '{"event": "x"}\n' + "y" * 200_000):
        path.write_text(before)
        with RunDirectory(tmp_path) as directory:
            directory.write_event({"event": "resumed"})
        assert [json.loads(line)["event"] for line in path.read_text().splitlines()][-1] == "resumed"
        assert path.read_text().startswith(before[: before.rfind("\n") + 1])


def test_an_unfinished_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "run_started"}\n{"event": "st')
    assert [event["event"] for event in read_events(path)] == ["run_started"]
    path.write_text('{"event": "run_started"}\n{"ev\n{"event": "step"}\n')
    with pytest.raises(StorageError, match="line 2 is damaged"):
        read_events(path)
    with pytest.raises(StorageError, match="No such file"):
        read_events(tmp_path / "missing.jsonl")


def test_the_record_reads_back_and_leaves_no_part_behind(tmp_path):
    record = RunRecord(plan=Plan.parse("dp=2"), config={"a": [1]}, measurement=Measurement(step_seconds=(0.1,)))
    with RunDirectory(tmp_path) as directory:
        directory.write_record(record)
    assert RunRecord.from_json((tmp_path / "record.json").read_text()) == record
    assert sorted(os.listdir(tmp_path)) == [".lock", "events.jsonl", "record.json"]


def test_two_runs_in_one_folder_are_refused_with_the_holders_number(tmp_path):
    with RunDirectory(tmp_path):
        with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} on .* since .*, is using") as caught:
            RunDirectory(tmp_path)
        assert caught.value.exit_code == 16
    RunDirectory(tmp_path).close()


def test_the_lock_of_a_dead_run_does_not_hold(tmp_path):
    code = "import os, sys; from pathlib import Path; from meshwright.train.events import RunDirectory\n"
    code += "RunDirectory(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    RunDirectory(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        RunDirectory(tmp_path / "file" / "run")


def on_a_full_disk(path):
    """Return a run's folder whose events cannot be written from now on."""
    directory = RunDirectory(path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, directory._events.fileno())
    os.close(full)
    return directory


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path):
    directory = on_a_full_disk(tmp_path)
    with pytest.raises(StorageError, match="No space left"):
        directory.write_event({"event": "step"})
    with pytest.raises(StorageError, match="No space left"):
        directory.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_hide_what_the_run_ended_of(tmp_path):
    directory = on_a_full_disk(tmp_path)
    directory._events.write("x")  # is flushed at the end
    directory.__exit__(ValueError, ValueError("the user's"), None)
