"""Lightning Fabric under a plan: norms, losses and weights of Fabric alone in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")

from tests.parity.jobs import fabric_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1", "tp=2", "dp=2,zero=2,batch=whole"])
def test_a_script_is_one_process(plan: str, tmp_path: Path) -> None:
    wanted = testing.run_ranks(jobs.run, 1, None)[0]
    for rank, found in enumerate(testing.run_ranks(jobs.run, 2, plan, str(tmp_path / "model.ckpt"))):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=FLOAT64)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=FLOAT64)
        testing.assert_parity(found["state"], wanted["state"], FLOAT64)
        assert found["writes"] == (rank == 0)


def test_shuffled_rows_are_each_seen_once() -> None:
    wanted = testing.run_ranks(jobs.shuffled, 1, None)[0]
    found = testing.run_ranks(jobs.shuffled, 2, "dp=2")
    for epoch, order in enumerate(wanted["rows"]):
        assert sorted(found[0]["rows"][epoch] + found[1]["rows"][epoch]) == sorted(order)
    assert all(one["losses"] == pytest.approx(wanted["losses"], rel=FLOAT64) for one in found)


def test_shares_draw_their_own_dropout() -> None:
    first, second = (one["drawn"] for one in testing.run_ranks(jobs.shuffled, 2, "dp=2", "dropout"))
    assert first[0] != second[0], "both shares, of two rows each, dropped the same entries"
    assert first[0] != first[1]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_ranks_with_other_batches_are_refused(plan: str) -> None:
    for outcome in testing.run_outcomes(jobs.shuffled, 2, plan, "apart"):
        assert "batch 0 is another one on rank 1" in str(outcome.error)


def test_a_mean_without_its_weight_is_refused() -> None:
    for outcome in testing.run_outcomes(jobs.without_weight, 2, "dp=2"):
        assert "without its weight" in str(outcome.error)


def test_gathering_shares_of_unequal_size_is_refused_with_what_joins_them() -> None:
    for outcome in testing.run_outcomes(jobs.gathered_unevenly, 2, "dp=2"):
        assert "mw.gather_batch" in str(outcome.error)


def test_a_mean_over_shares_of_unequal_size_is_refused_and_the_fix_is_one_process() -> None:
    for outcome in testing.run_outcomes(jobs.reduced, 2, "dp=2", "mean"):
        assert "that have [2, 1] rows of the last batch" in str(outcome.error)
    wanted = jobs.rows()[:3][0][:, 0].mean().item()
    for way in ("sum", "alike"):
        assert testing.run_ranks(jobs.reduced, 2, "dp=2", way) == pytest.approx([wanted, wanted], rel=FLOAT64)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("dp=2", marks=pytest.mark.long),
        "dp=2,zero=3,whole_below=1",
        pytest.param("tp=2", marks=pytest.mark.long),
    ],
)
def test_several_models_of_one_fabric_are_one_process(plan: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    wanted = testing.run_ranks(jobs.adversarial, 1, None, str(tmp_path / "one"))[0]
    for found in testing.run_ranks(jobs.adversarial, 2, plan, str(tmp_path / "two")):
        assert found["norms"] == pytest.approx(wanted["norms"], rel=FLOAT64)
        testing.assert_parity(found["state"], wanted["state"], FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_save_that_rank_0_cannot_write_is_an_error_on_every_rank(plan: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, other = testing.run_ranks(jobs.saved_in_vain, 2, plan, str(tmp_path))
    assert first["error"].startswith("StorageError: fabric.save could not write")
    assert first["error"] == other["error"]
    testing.assert_parity(first["state"], other["state"], FLOAT64)


def test_pipelines_are_refused() -> None:
    from meshwright.integrations.fabric import PlanStrategy

    with pytest.raises(mw.ConfigError, match="stages"):
        PlanStrategy("pp=2")
