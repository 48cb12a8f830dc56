"""DistributedDataParallel: buckets, unused parameters, static graphs, accumulation, uneven inputs, communication hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.transport_torch import models
from tests.transport_torch.harness import (
    BITWISE,
    SUM_ORDER_FLOAT32,
    Numbers,
    assert_plain,
    assert_same_numbers,
    make_group,
    record,
    record_end,
    without_prefix,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 3
ROWS = 12
# A few hundred bytes: every layer gets buckets of its own, and some start while backward still runs.
SMALL_BUCKETS = {"bucket_cap_mb": 300 / 2**20}

FLAGS: dict[str, dict[str, Any]] = {
    "one_bucket": {},
    "small_buckets": SMALL_BUCKETS,
    "views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static_graph": {**SMALL_BUCKETS, "static_graph": True},
    "static_graph_views": {**SMALL_BUCKETS, "static_graph": True, "gradient_as_bucket_view": True},
}


def _wrap(backend: str, kind: type[nn.Module], flags: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    group = make_group(backend)
    model = models.build(kind, dtype)
    if group.rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(group.rank())  # rank 0's have to arrive when the model is wrapped
    ddp = DistributedDataParallel(model, process_group=group, **flags)
    return group, ddp, torch.optim.SGD(ddp.parameters(), lr=models.LEARNING_RATE)


def train(backend: str, flags: dict[str, Any], pieces: int = 1) -> Numbers:
    """Train `Stack` on equal shares, each of them in so many pieces, of which the last one exchanges gradients."""
    group, ddp, optimizer = _wrap(backend, models.Stack, flags)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        x, y = (models.share(t, group.rank(), group.size()) for t in models.vectors(step, ROWS))
        losses = []
        for index, (part_x, part_y) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
            with ddp.no_sync() if index < pieces - 1 else contextlib.nullcontext():
                losses.append(F.mse_loss(ddp(part_x), part_y) / pieces)
                losses[-1].backward()
        record(numbers, step, ddp, torch.stack(losses).sum())
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, ddp)
    return without_prefix(numbers)


def train_branches(backend: str, flags: dict[str, Any]) -> Numbers:
    """Train a model that leaves a branch out; ranks differ in which, in the last steps."""
    group, ddp, optimizer = _wrap(backend, models.Branches, {"find_unused_parameters": True, **flags})
    numbers: Numbers = {}
    for step in range(NUM_STEPS + 1):
        x, y = (models.share(t, group.rank(), group.size()) for t in models.vectors(step, ROWS))
        loss = F.mse_loss(ddp(x, step if step < 2 else step + group.rank()), y)
        loss.backward()
        record(numbers, step, ddp, loss)
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, ddp)
    return without_prefix(numbers)


def train_uneven(backend: str, flags: dict[str, Any]) -> Numbers:
    """Train on ranks that run out of batches one after another."""
    group, ddp, optimizer = _wrap(backend, models.Stack, flags)
    numbers: Numbers = {}
    with ddp.join():
        for step in range(2 + group.rank()):
            x, y = (models.share(t, group.rank(), group.size()) for t in models.vectors(step, ROWS))
            loss = F.mse_loss(ddp(x), y)
            loss.backward()
            record(numbers, step, ddp, loss)
            optimizer.step()
            optimizer.zero_grad()
    record_end(numbers, ddp)
    return without_prefix(numbers)


def train_with_hook(backend: str, hook: str) -> Numbers:
    """Train in float32 with a hook in the place of the all-reduce.

    PowerSGD starts collectives when others of the same bucket end. With several buckets that comes in another order on
    every rank, on whatever CPU backend, and then ranks wait for each other: it gets one bucket.
    """
    flags = {} if "power_sgd" in hook else SMALL_BUCKETS
    group, ddp, optimizer = _wrap(backend, models.Stack, flags, torch.float32)
    if hook == "power_sgd":
        state = power_sgd.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    elif hook == "fp16_power_sgd":
        state = power_sgd.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(power_sgd.powerSGD_hook))
    else:
        ddp.register_comm_hook(group, getattr(default_hooks, hook))
    numbers: Numbers = {}
    for step in range(NUM_STEPS + 1):
        x, y = models.vectors(step, ROWS, torch.float32)
        x, y = (models.share(t, group.rank(), group.size()) for t in (x, y))
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        record(numbers, step, ddp, loss)
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, ddp)
    return without_prefix(numbers)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("flags", FLAGS)
def test_gradients_are_averaged(flags: str, num_ranks: int) -> None:
    per_rank = assert_same_numbers(train, num_ranks, FLAGS[flags])
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("flags", ["small_buckets", "views"])
def test_gradients_are_accumulated_without_an_exchange(flags: str, num_ranks: int) -> None:
    per_rank = assert_same_numbers(train, num_ranks, FLAGS[flags], 2)
    assert_plain(per_rank, models.plain_steps(models.Stack, NUM_STEPS, ROWS))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("flags", ["one_bucket", "small_buckets", "views"])
def test_ranks_agree_on_what_none_of_them_used(flags: str, num_ranks: int) -> None:
    per_rank = assert_same_numbers(train_branches, num_ranks, FLAGS[flags])
    gradients = {name for name in per_rank[0] if "gradient" in name}
    assert "step 0 gradient even.up.weight" in gradients
    assert "step 0 gradient odd.up.weight" not in gradients  # no rank used it: it has no gradient, rather than zeros
    assert {"step 2 gradient even.up.weight", "step 2 gradient odd.up.weight"} <= gradients
    for numbers in per_rank[1:]:
        for name, value in numbers.items():
            if "parameter" in name:
                assert torch.equal(value, per_rank[0][name]), name


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("flags", ["small_buckets", "views"])
def test_ranks_may_run_out_of_batches(flags: str, num_ranks: int) -> None:
    per_rank = assert_same_numbers(train_uneven, num_ranks, FLAGS[flags])
    plain = _plain_uneven(num_ranks)
    for rank, numbers in enumerate(per_rank):
        for name, expected in plain.items():
            assert (numbers[name] - expected).abs().max() <= 1e-11 * expected.abs().max(), f"rank {rank}, {name}"


def _plain_uneven(num_ranks: int) -> Numbers:
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    for step in range(1 + num_ranks):
        x, y = models.vectors(step, ROWS)
        for rank in range(num_ranks):
            if step < 2 + rank:
                loss = F.mse_loss(model(models.share(x, rank, num_ranks)), models.share(y, rank, num_ranks))
                (loss / num_ranks).backward()  # join divides by the number of ranks that there were at first
        optimizer.step()
        optimizer.zero_grad()
    numbers: Numbers = {}
    record_end(numbers, model)
    return numbers


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("hook", "three_ranks"),
    [
        ("allreduce_hook", SUM_ORDER_FLOAT32),
        ("fp16_compress_hook", 2e-3),  # one rounding to the 11 bits of float16, in another order
        ("power_sgd", 1e-4),  # an orthogonalisation divides by small differences
        ("fp16_power_sgd", 1e-2),
    ],
)
def test_hooks_exchange_gradients_in_their_own_way(hook: str, three_ranks: float, num_ranks: int) -> None:
    tolerance = BITWISE if num_ranks == 2 else three_ranks
    per_rank = assert_same_numbers(train_with_hook, num_ranks, hook, tolerance=tolerance)
    for numbers in per_rank[1:]:
        for name, value in numbers.items():
            assert "loss" in name or torch.equal(value, per_rank[0][name]), name
