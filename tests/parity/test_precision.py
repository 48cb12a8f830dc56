"""float32 with AdamW, bfloat16, models of several dtypes, sparse gradients for optimizers that need them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import assert_ranks_agree
from tests.parity.models import small_models as models
from tests.tolerances import BFLOAT16_TREND, FLOAT32, MIXED
from torch import nn

import meshwright as mw
from meshwright import testing

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def _build_float32() -> nn.Module:
    return models.build_gpt().float()


def _train(line: str, num_steps: int, optimizer: Any, devices: Any = None) -> list[testing.StepRecord]:
    options = testing.StepOptions(num_steps=num_steps, optimizer=optimizer, max_grad_norm=1.0)
    batches = cases.CASES["gpt"].batches(6)
    return testing.plan_steps(
        _build_float32, mw.Plan.parse(line), batches, losses.cross_entropy, options=options, devices=devices
    )


def _plain(num_steps: int, optimizer: Any) -> list[testing.StepRecord]:
    batches = cases.CASES["gpt"].batches(6)
    return testing.oracle_steps(
        _build_float32, batches, losses.cross_entropy, num_steps=num_steps, optimizer=optimizer, max_grad_norm=1.0
    )


def _assert_float32_bounds(records: list[testing.StepRecord], expected: list[testing.StepRecord]) -> None:
    for record, plain in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(plain.loss, rel=FLOAT32)
    # Both sides see the same weights in the first step only: later ones carry AdamW's amplification of roundings.
    testing.assert_parity(records[0].gradients, expected[0].gradients, FLOAT32)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(2, 1), (3, 2), (4, 3)])
def test_float32_adamw_over_ten_steps(num_ranks: int, micro_batches: int) -> None:
    line = f"dp={num_ranks},micro_batches={micro_batches}"
    per_rank = testing.run_ranks(_train, num_ranks, line, 10, ADAMW)
    _assert_float32_bounds(per_rank[0], _plain(10, ADAMW))
    assert_ranks_agree(per_rank)


@pytest.mark.parametrize("line", ["mode=data_parallel,dp=2", "mode=model_parallel,pp=2,micro_batches=2"])
def test_float32_adamw_in_one_process(line: str) -> None:
    _assert_float32_bounds(_train(line, 10, ADAMW, devices=["cpu", "cpu"]), _plain(10, ADAMW))


@pytest.mark.parametrize("line", ["dp=2,precision=bf16", "dp=2,precision=bf16,micro_batches=3"])
def test_bfloat16_learns_as_float32_does(line: str) -> None:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    per_rank = testing.run_ranks(_train, 2, line, 10, adamw)
    expected = _plain(10, adamw)
    losses_seen = [record.loss for record in per_rank[0]]
    assert losses_seen[-1] < 0.9 * losses_seen[0]
    assert losses_seen[-1] == pytest.approx(expected[-1].loss, rel=BFLOAT16_TREND)
    assert losses_seen[0] != pytest.approx(expected[0].loss, rel=FLOAT32), "nothing was computed in bfloat16"
    assert all(p.dtype == torch.float32 for p in per_rank[0][-1].parameters.values())
    assert_ranks_agree(per_rank)


def _train_mixed(line: str, devices: Any = None) -> list[testing.StepRecord]:
    batches = cases.CASES["mlp"].batches(7)
    return testing.plan_steps(models.MixedDtypes, mw.Plan.parse(line), batches, losses.square, devices=devices)


def _assert_mixed(records: list[testing.StepRecord]) -> None:
    expected = testing.oracle_steps(models.MixedDtypes, cases.CASES["mlp"].batches(7), losses.square)
    for record, plain in zip(records, expected, strict=True):
        assert {n: p.dtype for n, p in record.parameters.items()} == {n: p.dtype for n, p in plain.parameters.items()}
        testing.assert_parity(record.gradients, plain.gradients, MIXED)
    first = {name: g for name, g in records[0].gradients.items() if name != "half_scale"}
    testing.assert_parity(first, {n: g for n, g in expected[0].gradients.items() if n in first}, FLOAT32)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_models_of_several_dtypes(micro_batches: int) -> None:
    per_rank = testing.run_ranks(_train_mixed, 2, f"dp=2,micro_batches={micro_batches}")
    _assert_mixed(per_rank[0])
    assert_ranks_agree(per_rank)


def test_models_of_several_dtypes_in_one_process() -> None:
    _assert_mixed(_train_mixed("mode=data_parallel,dp=2", ["cpu", "cpu"]))
    _assert_mixed(_train_mixed("mode=model_parallel,pp=2", ["cpu", "cpu"]))


def _build_bag() -> nn.Module:
    return nn.EmbeddingBag(50, 5, sparse=True, padding_idx=0).double()


def _train_sparse(num_ranks: int) -> list[testing.StepRecord]:
    options = testing.StepOptions(optimizer=functools.partial(torch.optim.SparseAdam, lr=0.1))
    batches = cases.CASES["sparse"].batches(7)
    return testing.plan_steps(_build_bag, mw.Plan.parse(f"dp={num_ranks}"), batches, losses.square, options=options)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sparse_gradients_stay_sparse_for_sparse_adam(num_ranks: int) -> None:
    # E069: SparseAdam refuses dense gradients; the last rank's share holds nothing but padding.
    per_rank = testing.run_ranks(_train_sparse, num_ranks, num_ranks)
    sparse_adam = functools.partial(torch.optim.SparseAdam, lr=0.1)
    expected = testing.oracle_steps(_build_bag, cases.CASES["sparse"].batches(7), losses.square, optimizer=sparse_adam)
    # Sums over ranks round differently, and Adam divides by their size: one step is exact, the others are close.
    testing.assert_parity(per_rank[0][0].gradients, expected[0].gradients, 1e-11)
    testing.assert_parity(per_rank[0][-1].parameters, expected[-1].parameters, 1e-6)
    assert_ranks_agree(per_rank)
