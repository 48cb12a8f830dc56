"""Models built in pages of a file, and from pretrained weights: one device's values under every plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.parity.jobs import building_jobs as jobs
from tests.parity.jobs import checkpoint_jobs
from tests.scopes import FULL_GRID

import meshwright as mw
from meshwright import testing
from meshwright.run.building import pages

PLANS = [plan for plan in checkpoint_jobs.PLANS if plan != "dp=2"]  # whose ranks hold all of it
ONE_OF_EACH = ["dp=2,zero=3,whole_below=1", "tp=2", "pp=2,schedule=zbv,micro_batches=4"]
IN_PAGES = PLANS if FULL_GRID else [*ONE_OF_EACH, "dp=2,tp=2,zero=3"]
COLLECTED = PLANS if FULL_GRID else [*ONE_OF_EACH, "dp=2,pp=2,zero=2,micro_batches=2"]


@pytest.mark.skipif(pages.find_directory() is None, reason="no directory on a disk for pages")
@pytest.mark.parametrize("plan", IN_PAGES)
@pytest.mark.parametrize("kind", ["words", "images"])
def test_a_model_in_pages_is_one_devices_bit_for_bit(plan: str, kind: str) -> None:
    if kind == "images" and "pp" in plan and "tp" in plan:
        pytest.skip("its layers are no pairs: nothing is cut")
    expected = jobs.plain_state(kind)
    for rank in testing.run_ranks(jobs.compare, mw.Plan.parse(plan).num_ranks, plan, kind, "momentum"):
        assert rank["used"] == {1}
        assert rank["begin"] == rank["end"] == []
        assert rank["losses"][0] == rank["losses"][1]
        assert jobs.different(rank["state"], expected) == []


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2", "pp=2,micro_batches=2"])
def test_pretrained_weights_are_the_same_under_every_plan(tmp_path: Path, plan: str) -> None:
    torch.manual_seed(5)
    weights = {
        name: torch.randn(value.shape) if value.is_floating_point() else value + 3
        for name, value in jobs.plain_state("words").items()
        if name != "head.weight"
    }
    save_file(weights, tmp_path / "model.safetensors")
    for rank in testing.run_ranks(jobs.compare, 2, plan, "words", "momentum", str(tmp_path)):
        assert rank["begin"] == rank["end"] == []
        expected = {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}
        expected["head.weight"] = expected["tokens.weight"]
        assert jobs.different(rank["state"], expected) == []


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,micro_batches=2", "pp=2,tp=2,micro_batches=2"])
def test_the_look_at_the_first_batch_leaves_no_graph(plan: str) -> None:
    ranks = mw.Plan.parse(plan).num_ranks
    assert testing.run_ranks(jobs.graphs_left, ranks, plan) == [0] * ranks


@pytest.mark.parametrize("plan", ["dp=2,micro_batches=2,recompute=full", *COLLECTED])
def test_a_step_leaves_no_memory_to_the_collector_of_cycles(plan: str) -> None:
    ranks = mw.Plan.parse(plan).num_ranks
    assert testing.run_ranks(jobs.left_to_the_collector, ranks, plan) == [0] * ranks


@pytest.mark.parametrize("plan", ["dp=2,zero=3,whole_below=1", "tp=2", "pp=2,micro_batches=2"])
def test_layers_with_keys_that_are_random_in_each_process_are_the_same_model(plan: str) -> None:
    expected = jobs.keyed_losses(None)
    for losses in testing.run_ranks(jobs.keyed_losses, 2, plan):
        assert losses == pytest.approx(expected, rel=1e-12)
