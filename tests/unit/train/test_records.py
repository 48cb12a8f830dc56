"""train/launcher.py: record.json of a run that is continued. The ranks are played by what tells of their steps."""

import json
from pathlib import Path

import pytest

from meshwright.errors import StorageError
from meshwright.train import launcher
from meshwright.train.config.load import load_config
from meshwright.train.launcher import run_training

CONFIG = """
model = { target = "user_model:build" }
data = { source = "python-stdlib" }
optimizer = { lr = 0.1 }
train = { steps = 20, global_batch_size = 8, plan = "single", name = "a" }
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train so many steps, or end with an error; returns what record.json says was measured."""
    (tmp_path / "user_model.py").write_text("def build():\n    return None\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def train(num_steps, *, resume, error=None):
        def launch(_function, _ranks, _config, _resume, *, threads_per_rank, timeout_s, on_event, on_beats):
            del threads_per_rank
            for step in range(1, num_steps + 1):
                numbers = {
                    "seconds": 0.5,
                    "num_samples": 8,
                    "num_tokens": 0,
                    "samples_per_s": 16.0,
                    "tokens_per_s": 0.0,
                }
                event = {"event": "step", "step": step, "steps": 20, "loss": 1.0 / step, "skipped": False, "eta_s": 0.0}
                on_event(0, event | numbers | {"peak_memory_bytes": 1})
            Path("runs/a/checkpoints/step-00000020").mkdir(exist_ok=True)
            if error:
                raise error
            return [{"rank": 0, "step": 20, "stopped": False, "peak_memory_bytes": 7, "sent_bytes": {}}]

        monkeypatch.setattr(launcher, "launch", launch)
        run_training(load_config("c.toml"), resume=resume)
        measurement = json.loads(Path("runs/a/record.json").read_text())["measurement"]
        return measurement and len(measurement["step_seconds"])

    return train


def test_a_finished_run_that_is_continued_keeps_what_it_measured(train):
    assert train(13, resume=False) == 10
    assert train(0, resume=True) == 10
    assert train(0, resume=True, error=StorageError("the disk is gone")) == 10
    assert train(5, resume=True) == 2


def test_a_run_that_begins_anew_has_a_record_of_its_own(train):
    assert train(13, resume=False) == 10
    assert train(0, resume=False, error=StorageError("the disk is gone")) is None
