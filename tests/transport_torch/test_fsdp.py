"""FSDP2: nested units, both ways of resharding, replicas of shards, averages, mixed precision, clipping, accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.scopes import FULL_GRID
from tests.transport_torch import models
from tests.transport_torch.harness import (
    BACKEND,
    BITWISE,
    REFERENCE,
    Numbers,
    assert_plain,
    assert_same_numbers,
    make_mesh,
    record,
    record_end,
    strictly,
    sum_order,
    whole,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright import testing

NUM_STEPS = 2
ROWS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is sharded."""

    shape: tuple[int, ...]
    reshard: bool | int = True
    dtype: torch.dtype = torch.float64
    policy: MixedPrecisionPolicy | None = None
    max_grad_norm: float | None = None
    pieces: int = 1
    divide_by: float | None = None

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


def shard(backend: str, case: Case) -> Any:
    """Return a stack whose blocks are units of their own, in a unit for the rest."""
    names = ("shard",) if len(case.shape) == 1 else ("replicate", "shard")
    mesh = make_mesh(backend, case.shape, names)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.policy is not None:
        options["mp_policy"] = case.policy
    model = models.build(models.Stack, case.dtype)
    for block in list(model.children())[:-1]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def train(backend: str, case: Case) -> Numbers:
    """Train on equal shares, each in so many pieces; gradients are exchanged once a step or, with FSDP, not at all."""
    model = shard(backend, case)
    if case.divide_by is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(case.divide_by)
    rank = torch.distributed.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        x, y = (models.share(t, rank, case.num_ranks) for t in models.vectors(step, ROWS, case.dtype))
        losses = []
        for index, (part_x, part_y) in enumerate(zip(x.chunk(case.pieces), y.chunk(case.pieces), strict=True)):
            model.set_requires_gradient_sync(index == case.pieces - 1)
            losses.append(F.mse_loss(model(part_x).to(part_y.dtype), part_y) / case.pieces)
            losses[-1].backward()
        record(numbers, step, model, torch.stack(losses).sum())
        if case.max_grad_norm is not None:
            numbers[f"step {step} norm"] = whole(nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, model)
    return numbers


def look_at_shards(backend: str, case: Case) -> Numbers:
    """Return the shapes of what this rank holds between steps, and the sizes of its groups."""
    model = shard(backend, case)
    held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {"elements": torch.tensor(held), "units": torch.tensor(units)}


SHAPES = [(2,), (4,), (2, 2)]
# For what is done to numbers on their way: the ways themselves are those of sharded training.
TWO_AND_FOUR, TWO_AND_SQUARE = (SHAPES, SHAPES) if FULL_GRID else ([(2,), (4,)], [(2,), (2, 2)])


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sharded_training_is_plain_training(shape: tuple[int, ...], reshard: bool) -> None:
    case = Case(shape, reshard)
    per_rank = assert_same_numbers(train, case.num_ranks, case)
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS))


def test_shards_may_be_gathered_from_fewer_ranks_in_backward() -> None:
    # After forward, parameters are kept in halves. Backward gathers those over groups that FSDP makes by itself: they have
    # the default group's backend.
    case = Case((4,), reshard=2)
    per_rank = assert_same_numbers(train, 4, case)
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS))


@pytest.mark.parametrize("shape", TWO_AND_FOUR, ids=str)
def test_float32_gradients_are_averaged_by_the_backend(shape: tuple[int, ...]) -> None:
    # In float64 FSDP divides by itself; in float32 it asks for ReduceOp.AVG.
    case = Case(shape, dtype=torch.float32)
    per_rank = assert_same_numbers(train, case.num_ranks, case, tolerance=sum_order(case.num_ranks, torch.float32))
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS, torch.float32), tolerance=1e-5)


@pytest.mark.skipif(BACKEND == REFERENCE, reason="gloo has no ReduceOp.PREMUL_SUM")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_float32_gradients_are_divided_by_another_number(shape: tuple[int, ...]) -> None:
    # FSDP asks for PREMUL_SUM. A divisor that is twice the number of ranks halves the gradients.
    case = Case(shape, dtype=torch.float32, divide_by=2.0 * torch.Size(shape).numel())
    per_rank = testing.run_ranks(strictly, case.num_ranks, train, BACKEND, case)
    plain = models.plain_steps(models.Stack, 1, ROWS, torch.float32)
    for rank, numbers in enumerate(per_rank):
        for name, value in plain.items():
            if "gradient" in name:
                torch.testing.assert_close(numbers[name], value / 2, rtol=1e-4, atol=1e-6, msg=f"rank {rank}, {name}")


@pytest.mark.parametrize(
    ("shape", "reduce_dtype"),
    [
        (shape, dtype)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        if FULL_GRID or (shape, dtype) not in (((4,), torch.float32), ((2, 2), torch.bfloat16))
    ],
    ids=str,
)
def test_parameters_travel_in_bfloat16(shape: tuple[int, ...], reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    case = Case(shape, dtype=torch.float32, policy=policy)
    # A last bit of a sum decides which way a parameter is rounded to 8 bits.
    per_rank = assert_same_numbers(train, case.num_ranks, case, tolerance=BITWISE if shape == (2,) else 2e-2)
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS, torch.float32), tolerance=0.1)


@pytest.mark.parametrize("shape", TWO_AND_SQUARE, ids=str)
def test_norms_are_taken_over_all_shards(shape: tuple[int, ...]) -> None:
    case = Case(shape, max_grad_norm=0.05)
    per_rank = assert_same_numbers(train, case.num_ranks, case)
    model = models.build(models.Stack)
    x, y = models.vectors(0, ROWS)
    F.mse_loss(model(x), y).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for numbers in per_rank:
        torch.testing.assert_close(numbers["step 0 norm"], norm, rtol=1e-11, atol=0.0)


@pytest.mark.parametrize("shape", TWO_AND_SQUARE, ids=str)
def test_pieces_are_accumulated_without_an_exchange(shape: tuple[int, ...]) -> None:
    case = Case(shape, pieces=2)
    per_rank = assert_same_numbers(train, case.num_ranks, case)
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_rank_holds_its_share_only(shape: tuple[int, ...]) -> None:
    case = Case(shape)
    per_rank = assert_same_numbers(look_at_shards, case.num_ranks, case)
    model = models.build(models.Stack)
    whole_size = sum(p.numel() for p in model.parameters())
    # Dimension 0 is cut, and not always evenly: the shards of one replica are the whole, each once.
    assert sum(int(n["elements"]) for n in per_rank) == whole_size * (case.shape[0] if len(shape) == 2 else 1)
    assert {int(n["units"]) for n in per_rank} == {4}
