"""ZeroRedundancyOptimizer: each rank steps its share of the parameters and tells the others; the state can be put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.transport_torch import models
from tests.transport_torch.harness import (
    PLAIN,
    Numbers,
    assert_equal,
    assert_same_numbers,
    make_group,
    record,
    record_end,
    without_prefix,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 3
ROWS = 12
ADAM = {"lr": 0.01, "betas": (0.8, 0.9)}


def train(backend: str, views: bool) -> Numbers:
    """Train with Adam under DDP, and put the optimizer's state together on the last rank."""
    group = make_group(backend)
    ddp = DistributedDataParallel(models.build(models.Stack), process_group=group, bucket_cap_mb=300 / 2**20)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, process_group=group, parameters_as_bucket_view=views, **ADAM
    )
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        x, y = (models.share(t, group.rank(), group.size()) for t in models.vectors(step, ROWS))
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        record(numbers, step, ddp, loss)
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, ddp)
    optimizer.consolidate_state_dict(to=group.size() - 1)
    if group.rank() == group.size() - 1:
        numbers |= _state(optimizer.state_dict())
    own = sum(len(param_group["params"]) for param_group in optimizer.optim.param_groups)
    return {**without_prefix(numbers), "own parameters": torch.tensor(own)}


def _state(state_dict: dict[str, Any]) -> Numbers:
    return {
        f"state {index} {name}": value.clone()
        for index, state in state_dict["state"].items()
        for name, value in state.items()
    }


def _plain() -> Numbers:
    model = models.build(models.Stack)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    for step in range(NUM_STEPS):
        x, y = models.vectors(step, ROWS)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    numbers: Numbers = {}
    record_end(numbers, model)
    return numbers | _state(optimizer.state_dict())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_a_divided_optimizer_steps_as_a_whole_one(num_ranks: int, views: bool) -> None:
    per_rank = assert_same_numbers(train, num_ranks, views)
    plain = _plain()
    for rank, numbers in enumerate(per_rank):
        expected = {name: value for name, value in plain.items() if name in numbers}
        assert len(expected) == len(plain) if rank == num_ranks - 1 else expected
        # Adam divides by the gradient's own size, which makes more of the last bits of small ones.
        assert_equal({name: numbers[name] for name in expected}, expected, 100 * PLAIN, f"rank {rank}")
    shares = [int(numbers["own parameters"]) for numbers in per_rank]
    assert sum(shares) == sum("parameter " in name for name in plain)
    assert min(shares) > 0
