"""Table of strategies: every preset beside one device."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.plan.strategy_table import STRATEGIES, strategy_table
from meshwright.spec import LayerSpec
from meshwright.units import format_bytes

CLUSTER = mw.load_cluster("4xv100-32gb")
TRAIN = mw.TrainSpec(global_batch_size=64)


def rows(model: mw.ModelSpec) -> dict[str, list[str]]:
    return {line.split()[0]: line.split("  ") for line in strategy_table(model, CLUSTER, TRAIN).splitlines() if line}


def gpt(*, layers: int = 12, hidden: int = 768, heads: int = 12, sequence: int = 512) -> mw.ModelSpec:
    return mw.ModelSpec.transformer(layers=layers, hidden=hidden, heads=heads, vocab=50257, sequence=sequence)


def test_each_strategy_has_the_numbers_of_its_plans_prediction() -> None:
    model = gpt()
    one = mw.predict_plan(model, CLUSTER, TRAIN, mw.Plan())
    found = rows(model)
    for name in STRATEGIES:
        prediction = mw.predict_plan(model, CLUSTER, TRAIN, mw.Plan.preset(name, 4))
        cells = [cell.strip() for cell in found[name] if cell.strip()]
        assert cells[3] == f"{one.step_s / prediction.step_s:.2f}"
        assert cells[4:6] == [format_bytes(prediction.peak_bytes), f"{prediction.peak_bytes / one.peak_bytes:.2f}"]
        assert cells[6] == format_bytes(sum(prediction.sent_bytes.values()))


def test_what_tutorials_teach_comes_out() -> None:
    model = gpt()

    def sent(name: str) -> int:
        return sum(mw.predict_plan(model, CLUSTER, TRAIN, mw.Plan.preset(name, 4)).sent_bytes.values())

    whole = 2 * 3 / 4 * model.params_bytes
    assert sent("distributed") == pytest.approx(whole)
    assert sent("zero1") == pytest.approx(whole)
    assert sent("zero2") == pytest.approx(whole)
    assert sent("zero3") == pytest.approx(1.5 * whole)
    # One process copies values to the three other devices, and their gradients back.
    assert sent("data_parallel") == pytest.approx(3 * 2 * model.params_bytes)


def test_what_does_not_fit_says_by_how_much_and_what_is_refused_says_why() -> None:
    text = strategy_table(gpt(layers=3, hidden=12288, heads=96, sequence=2048), CLUSTER, TRAIN)
    assert "no, " in text
    assert "too much" in text
    assert "pipeline: plan: 'pp=4,micro_batches=8'" in strategy_table(
        mw.ModelSpec(name="one", layers=(LayerSpec(name="one", num_params=8, params_bytes=32),)), CLUSTER, TRAIN
    )
