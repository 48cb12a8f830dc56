"""Cores during a probe: what other programs took is told from what the ranks did themselves."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.measure.probe_cores import CoreUse, is_disturbed, share_of_others, start_watch
from meshwright.measure.probe_listing import show_cluster


def rank(own_s: float, busy_s: float, cores: float = 2, threads: int = 1) -> CoreUse:
    return CoreUse(seconds=10.0, cores=cores, busy_s=busy_s, own_s=own_s, threads=threads)


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        pytest.param([rank(10, 20), rank(10, 20)], 0.0, id="alone"),
        pytest.param([rank(5, 20), rank(5, 20)], 0.5, id="another-takes-half"),
        pytest.param([rank(10, 20)], 0.0, id="another-on-the-core-that-is-left"),
        pytest.param([rank(4, 20, threads=2)], 0.8, id="two-threads-want-both-cores"),
        pytest.param([rank(10, 350, cores=64)] * 4, 0.0, id="cores-for-all"),
        pytest.param([rank(5, 20)] * 4, 0.0, id="ranks-that-share-cores-with-each-other"),
    ],
)
def test_others_take_what_ranks_could_have_had(ranks: list[CoreUse], share: float) -> None:
    assert share_of_others(ranks) == pytest.approx(share)


def test_a_watch_sees_the_work_of_its_own_process() -> None:
    use = start_watch(1)
    assert sum(range(2_000_000)) > 0
    found = use()
    assert found.own_s > 0
    assert found.cores >= 1
    assert found.busy_s >= 0


def test_a_cluster_measured_beside_others_says_so() -> None:
    quiet = load_cluster("2xa100-80g")
    assert not is_disturbed(quiet)
    assert "warning" not in show_cluster(quiet)
    busy = dataclasses.replace(quiet, taken_by_others=0.4)
    assert is_disturbed(busy)
    assert "other programs took 40% of its cores" in show_cluster(busy)
    assert ClusterSpec.from_json(busy.to_json()) == busy
