"""Silent faults that others have had, put into this library: memory, recompute, shards, masks (all: benchmarks/anchors)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.parity.jobs import anchor_jobs as jobs

from meshwright import testing

CUT = "dp=2,zero=3,whole_below=0"
ALONE = ("dp=2,zero=1", "dp=2,zero=2", CUT, "pp=2,micro_batches=2")
"""Plans under which ranks hold what no other holds."""


def _told(function: Any, *args: Any) -> dict[str, Any]:
    per_rank = testing.run_ranks(function, 2, *args)
    assert per_rank[0]["text"] == per_rank[1]["text"]
    assert per_rank[0]["steps"] == per_rank[1]["steps"]
    return per_rank[0]


@pytest.mark.parametrize("plan", ALONE)
@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_bit_of_what_one_rank_alone_holds_is_found_before_the_sentinels_step(plan: str, what: str) -> None:
    told = _told(jobs.flip, plan, what, 3)
    assert (told["kind"], told["steps"], told["rank"]) == ("CorruptionError", 3, 1), told
    assert "changed from" in told["text"]
    assert ("(the optimizer's exp_avg_sq)" in told["part"]) == (what == "state")


def test_a_buffer_of_one_stage_is_watched() -> None:
    told = _told(jobs.flip, "pp=2,micro_batches=2", "buffer", 3)
    assert (told["kind"], told["part"], told["rank"]) == ("CorruptionError", "scale", 1), told


@pytest.mark.parametrize("plan", ["pp=2,micro_batches=2"])
def test_a_script_that_writes_to_data_where_one_rank_holds_it_is_no_fault(plan: str) -> None:
    assert _told(jobs.clamp_one, plan, 8)["kind"] is None


@pytest.mark.parametrize("plan", ["dp=2,recompute=full", "dp=2,recompute=selective", CUT + ",recompute=full"])
def test_a_layer_that_is_another_when_it_runs_again_is_found(plan: str) -> None:
    told = _told(jobs.recomputed, plan, False, True)
    assert (told["kind"], told["steps"], told["part"]) == ("CorruptionError", 0, "layers.0"), told
    assert "another one when its forward runs again in backward" in told["text"]
    for draws in (False, True):  # Python's numbers are set back as well
        assert _told(jobs.recomputed, plan, draws, False)["kind"] is None


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        ("shards_swapped", "put together again on rank 0, are not the parameter that was cut"),
        ("row_not_summed", "on shards differs from what it gives whole"),
        ("one_mask", "the masks that dropout draws of the ranks' shards are equal"),
    ],
)
def test_what_goes_wrong_on_the_real_ranks_alone_stops_the_first_step(mutation: str, words: str) -> None:
    told = _told(jobs.mutated, "tp=2", mutation)
    assert (told["kind"], told["steps"]) == ("CorruptionError", 0), told
    assert words in told["text"]
    assert _told(jobs.mutated, "tp=2", "nothing")["kind"] is None


def test_layers_in_which_all_shards_would_draw_one_mask_are_not_cut() -> None:
    on_slices = "2 layers run on slices of the sequence between their regions"
    for mutation, is_cut in (("nothing", True), ("one_mask_everywhere", False)):
        told = _told(jobs.mutated, "tp=2", mutation)
        assert told["kind"] is None
        assert (on_slices in told["reasons"]) == is_cut
