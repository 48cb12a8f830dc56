"""Loggers of a run: what they are told, read back by each tool's own library where that is installed."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.errors import MissingDependencyError
from meshwright.train.loggers import fan_out, feeding, metrics_csv
from meshwright.train.loggers.fan_out import PACKAGES, Loggers, require_packages

SETTINGS = {"train": {"steps": 3, "plan": "dp=2"}, "model": {"kwargs": {}}}


def step(number, loss=None, **changes):
    event = {
        "event": "step", "time": 100.0 + number, "step": number, "loss": 1.0 / number if loss is None else loss, "grad_norm": 0.5,
        "lr": 0.1, "seconds": 0.25, "samples_per_s": 32.0, "tokens_per_s": 64.0, "peak_memory_bytes": 1024,
    }  # fmt: skip
    return event | changes


def log_a_run(name, folder, *, has_failed=False, resumes=True):
    loggers = Loggers((name,), folder, "mine", SETTINGS)
    events = [{"event": "run_started", "time": 100.0}, step(1), step(2), step(3)]
    if resumes:
        events += [{"event": "resumed", "time": 200.0, "step": 2}, step(3, loss=9.0)]
    events += [
        {"event": "saved", "step": 3},
        {"event": "evaluated", "time": 300.0, "step": 3, "loss": 0.75, "seconds": 1.0},
    ]
    for event in events:
        loggers.take(event)
    loggers.close(has_failed=has_failed)


def rows_of(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text(encoding="utf-8").splitlines()))


def test_csv_has_a_row_for_each_step_and_drops_what_was_undone(tmp_path):
    log_a_run("csv", tmp_path)
    rows = rows_of(tmp_path)
    assert [(row["step"], row["train/loss"], row["eval/loss"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "0.5", ""),
        ("3", "9.0", ""),
        ("3", "", "0.75"),
    ]
    assert float(rows[0]["train/peak_memory_bytes"]) == 1024


def test_csv_of_a_killed_run_loses_its_unfinished_row_alone(tmp_path):
    log_a_run("csv", tmp_path, resumes=False)
    with (tmp_path / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("4,12")
    loggers = Loggers(("csv",), tmp_path, "mine", SETTINGS)
    loggers.take({"event": "resumed", "time": 1.0, "step": 3})
    loggers.take(step(4))
    loggers.close(has_failed=False)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "3", "4"]


def test_csv_keeps_what_is_not_finite(tmp_path):
    loggers = Loggers(("csv",), tmp_path, "mine", SETTINGS)
    loggers.take({"event": "run_started", "time": 1.0})
    loggers.take(step(1, loss=math.nan, grad_norm=None))
    loggers.close(has_failed=True)
    (row,) = rows_of(tmp_path)
    assert (row["train/loss"], row["train/grad_norm"]) == ("nan", "")


def test_csv_follows_no_link(tmp_path, capsys):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "metrics.csv").symlink_to(target)
    log_a_run("csv", tmp_path)
    assert target.read_text() == "precious"
    assert "the logger 'csv' failed and gets nothing more" in capsys.readouterr().err


def test_a_logger_that_fails_is_told_once_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    class Broken:
        def begin(self, step):
            pass

        def log(self, step, metrics, at):
            raise RuntimeError("the server is gone\x1b[31m")

        def end(self, *, has_failed):
            raise AssertionError("it gets nothing more")

    make = fan_out._make
    monkeypatch.setattr(fan_out, "_make", lambda name, *about: Broken() if name == "wandb" else make(name, *about))
    loggers = Loggers(("wandb", "csv"), tmp_path, "mine", SETTINGS)
    for event in ({"event": "run_started", "time": 1.0}, step(1), step(2)):
        loggers.take(event)
    loggers.close(has_failed=False)
    told = capsys.readouterr().err
    assert told.count("warning: the logger 'wandb' failed and gets nothing more: RuntimeError: the server is gone") == 1
    assert "\x1b" not in told
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3


class Slow:
    """A logger whose server does not answer."""

    def __init__(self, is_released):
        self._is_released = is_released
        self.told = []

    def begin(self, step):
        self._is_released.wait(30)

    def log(self, step, metrics, at):
        self.told.append(step)

    def end(self, *, has_failed):
        self.told.append("end")


def run_beside(monkeypatch, tmp_path, one, names=("wandb", "csv")):
    make = fan_out._make
    monkeypatch.setattr(fan_out, "_make", lambda name, *about: one if name == "wandb" else make(name, *about))
    loggers = Loggers(names, tmp_path, "mine", SETTINGS)
    for event in ({"event": "run_started", "time": 1.0}, step(1), step(2)):
        loggers.take(event)
    return loggers


def test_a_logger_that_hangs_keeps_neither_the_run_nor_the_others(tmp_path, capsys, monkeypatch):
    is_released = threading.Event()
    slow = Slow(is_released)
    try:
        loggers = run_beside(monkeypatch, tmp_path, slow)
        monkeypatch.setattr(feeding, "END_S", 0.3)
        loggers.close(has_failed=False)
        assert "the logger 'wandb' failed and gets nothing more: it has not ended" in capsys.readouterr().err
        assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2"]
    finally:
        is_released.set()
    assert slow.told == []


def test_whoever_hurries_waits_for_no_logger(tmp_path, monkeypatch):
    is_released = threading.Event()
    try:
        loggers = run_beside(monkeypatch, tmp_path, Slow(is_released))
        began = time.monotonic()
        loggers.close(has_failed=False, is_hurried=lambda: True)
        assert time.monotonic() - began < 5.0
    finally:
        is_released.set()


def test_a_logger_that_falls_behind_gets_nothing_more(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(feeding, "MOST_WAITING", 3)
    is_released = threading.Event()
    slow = Slow(is_released)
    try:
        loggers = run_beside(monkeypatch, tmp_path, slow, ("wandb",))
        for number in range(3, 9):
            loggers.take(step(number))
    finally:
        is_released.set()
    loggers.close(has_failed=False)
    assert capsys.readouterr().err.count("the logger 'wandb' failed and gets nothing more: it is 3 calls behind") == 1


def test_a_logger_that_ends_the_process_does_not(tmp_path, capsys, monkeypatch):
    class Leaving(Slow):
        def log(self, step, metrics, at):
            raise SystemExit(3)

    is_released = threading.Event()
    is_released.set()
    loggers = run_beside(monkeypatch, tmp_path, Leaving(is_released))
    loggers.close(has_failed=False)
    assert "the logger 'wandb' failed and gets nothing more: SystemExit: 3" in capsys.readouterr().err


def test_csv_keeps_its_rows_where_it_is_killed_while_it_begins(tmp_path, monkeypatch):
    log_a_run("csv", tmp_path, resumes=False)
    before = (tmp_path / "metrics.csv").read_text()
    monkeypatch.setattr(metrics_csv, "write_new_file", lambda *_: {}["killed"])
    loggers = Loggers(("csv",), tmp_path, "mine", SETTINGS)
    loggers.take({"event": "resumed", "time": 1.0, "step": 1})
    loggers.close(has_failed=True)
    assert (tmp_path / "metrics.csv").read_text() == before


def test_csv_waits_for_no_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "metrics.csv")
    loggers = Loggers(("csv",), tmp_path, "mine", SETTINGS)
    loggers.take({"event": "resumed", "time": 1.0, "step": 1})
    loggers.close(has_failed=False)
    assert "the logger 'csv' failed and gets nothing more: StorageError" in capsys.readouterr().err


def test_a_missing_package_is_an_error_with_its_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_packages(("csv",))
    with pytest.raises(MissingDependencyError, match=r"train.log = 'mlflow' needs the package 'mlflow'") as caught:
        require_packages(("csv", "mlflow"))
    assert caught.value.fix == "pip install 'meshwright[mlflow]'"


def test_the_loggers_module_needs_none_of_the_packages():
    assert not [name for name in ("wandb", "mlflow") if name in sys.modules]
    assert set(PACKAGES) == {"tensorboard", "wandb", "mlflow", "csv"}


@pytest.fixture
def environment_put_back(monkeypatch):
    """Variables that these libraries, and their loggers for them, set for the rest of the process."""
    for name in ("MLFLOW_ALLOW_FILE_STORE", "WANDB_SERVICE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_tensorboard_reads_its_files_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_a_run("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = [(one.step, round(one.value, 6), one.wall_time) for one in read.Scalars("train/loss")]
    assert losses == [(1, 1.0, 101.0), (2, 0.5, 102.0), (3, 9.0, 103.0)]  # step 3 as it was done again
    assert [one.value for one in read.Scalars("eval/loss")] == [0.75]
    assert "train/tokens_per_s" in read.Tags()["scalars"]


@pytest.mark.usefixtures("environment_put_back")
def test_mlflow_reads_its_store_back(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    log_a_run("mlflow", tmp_path, has_failed=True)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("meshwright").experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.params["train.plan"] == "dp=2"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 9.0)]
    assert run.data.metrics["eval/loss"] == 0.75
    assert run.data.tags["resumed_after_step"] == "2"


@pytest.mark.usefixtures("environment_put_back")
def test_wandb_reads_its_offline_file_back(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        log_a_run("wandb", tmp_path, resumes=False)
    finally:
        wandb.teardown()  # its process lives until the end of this one otherwise
    (path,) = Path(tmp_path).glob("wandb/offline-run-*/*.wandb")
    losses, held_out = wandb_history(path)
    assert losses == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert held_out == [0.75]


def wandb_history(path):
    """Return the losses by step and the held-out losses of an offline file: LevelDB's log format around protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts, losses, held_out = 7, b"", [], []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # whole, or the last part
            continue
        record, parts = wandb_internal_pb2.Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            losses += [(row["_step"], row["train/loss"])] if "train/loss" in row else []
            held_out += [row["eval/loss"]] if "eval/loss" in row else []
    return losses, held_out
