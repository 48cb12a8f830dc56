"""A strategy that is added in one folder, as docs/adding_a_strategy.md has it: local SGD against plain models in one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.parity import harness
from tests.parity.local_sgd import jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

GUIDE = Path(__file__).parents[2] / "docs" / "adding_a_strategy.md"

# Case, ranks, steps between averages, samples, micro-batches: shares are unequal in all rows but the last.
ROWS = (
    ("mlp", 2, 2, 7, 1),
    ("mlp", 2, 3, 7, 2),
    ("mlp", 3, 2, 11, 3),
    ("mlp", 2, 2, 8, 1),
)


@pytest.mark.parametrize(("name", "num_ranks", "every", "num_samples", "micro_batches"), ROWS)
def test_local_steps_equal_plain_models_that_are_averaged(
    name: str, num_ranks: int, every: int, num_samples: int, micro_batches: int
) -> None:
    plan = f"dp={num_ranks},micro_batches={micro_batches}"
    found = testing.run_ranks(jobs.train, num_ranks, name, plan, every, num_samples, 4)
    for got, wanted in zip(found, jobs.reference(name, num_ranks, every, num_samples, 4), strict=True):
        for step, (loss, parameters) in enumerate(wanted):
            assert got.losses[step] == pytest.approx(loss, rel=FLOAT64)
            testing.assert_parity(got.parameters[step], parameters, FLOAT64)
    assert len({tuple(training.norms) for training in found}) == 1
    for step in range(4):
        is_equal = all(
            torch.equal(value, found[1].parameters[step][key]) for key, value in found[0].parameters[step].items()
        )
        assert is_equal == ((step + 1) % every == 0)


def test_averaged_at_every_step_it_is_one_process() -> None:
    # With equal shares the mean of what SGD makes of each share's gradient is what it makes of their mean.
    setting = harness.Setting(num_samples=8)
    train = functools.partial(testing.run_ranks, jobs.train, 2, "mlp", "dp=2")
    for training in train(1, setting.num_samples, setting.num_steps):
        for got, wanted in zip(training.parameters, harness.reference("mlp", setting), strict=True):
            testing.assert_parity(got, wanted.parameters, FLOAT64)


def test_a_step_sends_what_its_forecast_says() -> None:
    for training in testing.run_ranks(jobs.train, 2, "mlp", "dp=2", 2, 8, 4):
        assert training.expected_bytes is not None
        # Weights, losses and norms come on top.
        small = 4 * 1024
        assert 4 * training.expected_bytes <= training.sent_bytes <= 4 * training.expected_bytes + small


def test_a_checkpoint_of_ranks_that_differ_is_refused(tmp_path: Path) -> None:
    # Its tensors would have come from one rank or the other, and it would have loaded.
    for outcome in testing.run_outcomes(jobs.save, 2, "mlp", "dp=2", str(tmp_path)):
        assert isinstance(outcome.error, mw.ApplyError), outcome
        assert "a checkpoint has one" in str(outcome.error)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("file", ["engine.py", "expected_bytes.py"])
def test_the_guide_shows_these_files_as_they_are(file: str) -> None:
    source = (Path(jobs.__file__).parent / file).read_text(encoding="utf-8")
    assert source.partition("\n\n\n")[2].strip() in GUIDE.read_text(encoding="utf-8")
