"""One real comparison: what the ledger counted is what the formulas say, and the losses are one device's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.compare.comparison import Comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("templates"),
]  # four starts of ranks, on however busy a machine

CLASSIC = Path(__file__).parents[2] / "examples" / "mlp_classic.toml"
WIDTH, HIDDEN, BATCH = 64, 128, 8
SMALL = [
    f"model.kwargs={{input_size = {WIDTH}, hidden_size = {HIDDEN}, middle_size = {WIDTH}, output_size = {WIDTH}}}",
    f"data.kwargs={{num_samples = 40, input_size = {WIDTH}, output_size = {WIDTH}}}",
    f"train.global_batch_size={BATCH}",
]
# Weights and biases of three layers, in float32.
GRADIENT_BYTES = 4 * ((WIDTH * HIDDEN + HIDDEN) + (HIDDEN * WIDTH + WIDTH) + (WIDTH * WIDTH + WIDTH))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return mw.compare_plans(CLASSIC, ["single", "model_parallel", "distributed"], steps=4, overrides=SMALL)


def row_of(comparison, name):
    return next(row for row in comparison.rows if row.trial.name == name)


def test_distributed_sends_what_the_ring_says(comparison):
    row = row_of(comparison, "distributed")
    assert row.trial.formula_bytes == GRADIENT_BYTES  # 2 (n - 1) / n = 1 on two ranks
    assert row.sent_bytes == pytest.approx(GRADIENT_BYTES, rel=0.02)
    assert row.sent_bytes > GRADIENT_BYTES  # what the ranks agree on comes on top
    assert row.sent_ratio == pytest.approx(row.sent_bytes / GRADIENT_BYTES)
    assert len(row.trial.peak_memory_bytes) == 2


def test_model_parallel_sends_the_cut_activations_there_and_back(comparison):
    row = row_of(comparison, "model_parallel")
    assert row.trial.formula_bytes == 2 * BATCH * HIDDEN * 4  # C = sum(s_i x b) x 2, cut after the wide layer
    assert row.sent_bytes == row.trial.formula_bytes
    assert row.sent_ratio == 1


def test_one_device_sends_nothing(comparison):
    row = row_of(comparison, "single")
    assert (row.sent_bytes, row.trial.formula_bytes, row.sent_ratio) == (0, 0, None)


def test_all_plans_train_the_same(comparison):
    losses = row_of(comparison, "single").trial.losses
    assert len(losses) == 3 + 4
    assert len(set(losses)) == len(losses)  # it does train
    for row in comparison.rows:
        assert row.loss_difference < 1e-5, row.trial.name
        assert len(row.trial.step_seconds) == 4
        assert set(row.trial.num_samples) == {BATCH}


def test_every_row_has_its_numbers(comparison):
    for row in comparison.rows:
        assert row.step_s > 0
        assert row.speedup_same_cores > 0
        assert row.efficiency == pytest.approx(row.speedup / row.trial.num_devices)
        assert 0 <= row.exposed_fraction < 1
        assert row.trial.other_cores is None or 0 <= row.trial.other_cores <= os.cpu_count() * 1.5
        assert 50 * 2**20 < row.peak_memory_bytes < 2 * 2**30
    assert row_of(comparison, "distributed").exposed_fraction > 0
    assert Comparison.from_json(comparison.to_json()) == comparison
    assert "is the fastest" in comparison.conclusion
