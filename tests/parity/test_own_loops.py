"""Own loops, `model(...)`, `model.backward` and `model.optimizer.step()`: equal to one plain process under each plan."""

from __future__ import annotations

import functools
import pathlib
import runpy
from typing import Any

import pytest
import torch
from tests.parity.jobs import own_loop_edge_jobs as edge_jobs
from tests.parity.jobs import own_loop_jobs as jobs
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing

SHARES = {1: (7,), 2: (5, 2), 3: (4, 2, 1)}
PLANS = [
    ("dp=2", 2),
    ("dp=3", 3),
    ("dp=2,bucket_bytes=1KiB", 2),
    ("dp=2,zero=1", 2),
    ("dp=3,zero=1", 3),
    ("dp=2,zero=2", 2),
    ("dp=2,zero=3,whole_below=1", 2),
    ("dp=3,zero=3,whole_below=1", 3),
    ("tp=2", 2),
    ("tp=2,recompute=full", 2),
    ("dp=2,zero=3,whole_below=1,recompute=full", 2),
    ("dp=2,tp=2", 4),
    ("dp=2,tp=2,zero=3,whole_below=1", 4),
]


@functools.cache
def expected(script: str) -> jobs.Found:
    return jobs.alone(script)


def assert_equal(found: jobs.Found, wanted: jobs.Found) -> None:
    assert found["told"] == pytest.approx(wanted["told"], rel=FLOAT64)
    for kind in ("gradients", "state"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, value in wanted[kind].items():
            scale = value.abs().max().item()
            difference = (found[kind][name] - value).abs().max().item()
            assert difference <= FLOAT64 * max(scale, 1e-3), f"{kind} of {name}: {difference} of {scale}"


@pytest.mark.parametrize("script", list(jobs.SCRIPTS))
@pytest.mark.parametrize(("plan", "num_ranks"), PLANS)
def test_an_own_loop_is_one_devices(script: str, plan: str, num_ranks: int) -> None:
    sizes = SHARES[int(plan.partition("dp=")[2][:1] or 1)]
    per_rank: list[Any] = testing.run_ranks(jobs.under_plan, num_ranks, script, plan, sizes)
    for found in per_rank:
        assert_equal(found, expected(script))


def test_shares_matter_to_what_is_compared() -> None:
    # The control: a rank's mean is not the batch's.
    x, y = jobs.batch_of(0)
    model = jobs.Plain(jobs.build_net)
    own = (model(x) - y).square().mean()
    part = (model(x[:5]) - y[:5]).square().mean()
    assert abs(own - part) > 0.1 * torch.abs(own)


def test_an_optimizer_of_whole_matrices_gets_them() -> None:
    wanted = edge_jobs.by_matrices("single")
    for found in testing.run_ranks(edge_jobs.by_matrices, 2, "tp=2"):
        assert found == pytest.approx(wanted, rel=FLOAT64)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,bucket_bytes=1KiB"])
def test_torchs_clipping_and_hooks_see_whole_gradients(plan: str) -> None:
    for found in testing.run_ranks(jobs.under_plan, 2, "by_torch", plan, SHARES[2]):
        assert_equal(found, expected("by_torch"))


@pytest.mark.parametrize(
    ("plan", "num_ranks"), [("dp=3", 3), ("dp=2,zero=1", 2), ("dp=2,zero=3,whole_below=1", 2), ("dp=2,tp=2", 4)]
)
def test_a_loss_over_the_gathered_batch_is_one_devices(plan: str, num_ranks: int) -> None:
    for found in testing.run_ranks(jobs.under_plan, num_ranks, "contrastive", plan, SHARES[int(plan[3])]):
        assert_equal(found, expected("contrastive"))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,whole_below=1"])
def test_rewards_that_are_normalised_over_the_gathered_batch_are_one_devices_and_a_loss_of_ones_own_is_told(
    plan: str,
) -> None:
    for found in testing.run_ranks(jobs.under_plan, 2, "rewarded", plan, SHARES[2]):
        assert_equal(found, expected("rewarded"))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2", "dp=2,zero=3,whole_below=1", "tp=2,recompute=full"])
def test_gradients_pass_through_a_frozen_model(plan: str) -> None:
    for found in testing.run_ranks(jobs.under_plan, 2, "frozen_critic", plan, SHARES[2 if "dp=2" in plan else 1]):
        assert_equal(found, expected("frozen_critic"))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,whole_below=1"])
def test_a_rank_without_samples_counts_for_nothing(plan: str) -> None:
    model = jobs.Plain(jobs.build_net)
    wanted = []
    for seed in range(2):
        model.zero_grad()
        x, y = jobs.batch_of(seed)
        model.backward((model(x) - y).square().mean())
        wanted.append({name: g.clone() for name, g in model.full_gradients().items() if g is not None})
    for found in testing.run_ranks(edge_jobs.empty_share, 2, plan):
        for kind, gradients in zip(("gradients", "second"), wanted, strict=True):
            testing.assert_parity(found[kind], gradients, FLOAT64)


@pytest.mark.parametrize(
    ("way", "plan", "word"),
    [
        ("no weight", "dp=2", "without its weight"),
        ("no graph", "dp=2", "without a graph"),
        ("another model", "dp=2", "does not come from this model"),
        ("other losses", "dp=2", "losses of different kinds"),
        ("stale", "dp=2,zero=1", "updated by the optimizer between"),
        ("closure", "dp=2", "given a closure"),
        ("nothing counts", "dp=2", "add up to 0"),
        ("not finite", "dp=2", "is not finite"),
        ("clipped by torch", "dp=2,zero=1", "model.clip_grad_norm"),
        ("clipped by torch", "tp=2", "model.clip_grad_norm"),
        ("written", "dp=2", "not the same on all ranks"),
        ("zeroed", "dp=2,zero=1", "model.zero_grad()"),
        ("shared", "dp=2", "is in another model under the plan"),
        ("read early", "tp=2", "had another shape"),
        ("pipeline", "pp=2", "several stages"),
    ],
)
def test_what_would_not_be_one_devices_is_refused(way: str, plan: str, word: str) -> None:
    for rank, outcome in enumerate(testing.run_outcomes(edge_jobs.refused_way, 2, plan, way)):
        assert isinstance(outcome.error, mw.MeshwrightError), f"rank {rank}: {outcome.error!r}"
        assert word in str(outcome.error), f"rank {rank}: {outcome.error}"


def test_replicas_in_threads_are_refused_by_name() -> None:
    with pytest.raises(mw.ApplyError, match="several threads"):
        edge_jobs.refused_way("data_parallel,dp=2", "replicas")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.parametrize("example", ["gan", "distillation", "contrastive", "vae", "lora"])
def test_an_example_has_one_devices_losses(example: str, plan: str) -> None:
    found = testing.run_ranks(run_example, 2, example, plan)
    assert found[0] == pytest.approx(run_example(example, "single"), rel=1e-9)
    assert found[0] == found[1]


def test_adapters_under_a_pipeline_are_one_devices_and_an_own_loop_is_refused() -> None:
    found = testing.run_ranks(run_example, 2, "lora", "pp=2,micro_batches=2")
    assert found[0] == pytest.approx(run_example("lora", "single"), rel=1e-9)
    for outcome in testing.run_outcomes(run_example, 2, "vae", "pp=2"):
        assert "several stages" in str(outcome.error)


def run_example(name: str, plan: str) -> list[float]:
    path = pathlib.Path(__file__).parents[2] / "examples" / "loops" / f"{name}.py"
    return runpy.run_path(str(path))["train"](plan, steps=3, samples=9)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2"])
def test_buffers_follow_rank_0_and_steps_are_counted(plan: str) -> None:
    (state, num_steps, reasons), (other, *_) = testing.run_ranks(edge_jobs.with_buffers, 2, plan)
    assert any("BatchNorm layers (1) normalise over each rank's share" in reason for reason in reasons)
    assert num_steps == jobs.STEPS
    assert state["1.num_batches_tracked"] == jobs.STEPS
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_script_may_compile_its_call_of_the_model(plan: str) -> None:
    for compiled, plain in testing.run_ranks(edge_jobs.compiled_call, 2, plan):
        assert compiled == pytest.approx(plain, rel=FLOAT64)


def test_inputs_may_be_cast_by_the_script_before_layers_are_cut() -> None:
    (wanted,) = testing.run_ranks(edge_jobs.cast_inputs, 1, "single")
    for found in testing.run_ranks(edge_jobs.cast_inputs, 2, "tp=2"):
        assert found == pytest.approx(wanted, rel=2e-2)
