"""Probe of this machine: real ranks, numbers in range, and a file that the planner reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scopes import FULL_GRID

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.hardware.exchanges import EXCHANGES
from meshwright.measure.probe_listing import show_cluster
from meshwright.measure.probe_sizes import COLLECTIVE_BYTES, VISITS


@pytest.mark.long
def test_a_probe_is_a_cluster_that_the_planner_reads(tmp_path: Path) -> None:
    seen: list[str] = []
    cluster = mw.probe_cluster(2, budget_s=0.005, on_stage=lambda name, _index, _count: seen.append(name))
    assert seen == list(VISITS)
    assert cluster.num_devices == 2
    assert cluster.link is not None
    assert cluster.efficiency is not None
    assert cluster.device.peak("fp32") > 1e8
    assert all("measured 20" in text and "spread" in text for text in cluster.device.sources.values())
    assert set(cluster.efficiency.exchanges) == set(EXCHANGES)
    for rows in cluster.efficiency.exchanges.values():
        assert [row[:2] for row in rows] == [(2, size) for size in sorted(COLLECTIVE_BYTES)]
        assert rows[-1][2] > rows[0][2] > 0  # 16 MiB take longer than 1 KiB
    assert 0 <= cluster.efficiency.run_s < 1e-5
    for curve in (cluster.efficiency.far_traffic, cluster.efficiency.far_product):
        assert curve[0] == (64 * 2**20, 0.0)
        assert [size for size, _ in curve] == sorted({size for size, _ in curve})
    path = tmp_path / "host.json"
    path.write_text(cluster.to_json(indent=2), encoding="utf-8")
    read = mw.load_cluster(path)
    assert read == cluster
    assert "2 x cpu" in show_cluster(read)
    assert "reduce-scatter" in show_cluster(read)
    spec = mw.ModelSpec.transformer(layers=4, hidden=128, heads=4, vocab=256, sequence=64)
    plans = mw.make_plans(spec, read, mw.TrainSpec(global_batch_size=8), top=3)
    assert all(plan.num_devices == 2 and plan.prediction is not None for plan in plans)


@pytest.mark.skipif(not FULL_GRID, reason="another ten seconds of a probe: make test-grid")
def test_one_rank_has_no_link() -> None:
    assert mw.probe_cluster(1, budget_s=0.005).link is None


@pytest.mark.parametrize("arguments", [{"num_devices": 0}, {"budget_s": 0.0}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="rule"):
        mw.probe_cluster(**arguments)  # type: ignore[arg-type]
