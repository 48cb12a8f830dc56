"""torch.distributed.pipelining: every kind of schedule, with stages in rows, in loops and in a V."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport_torch import models
from tests.transport_torch.harness import BITWISE, PLAIN, Numbers, assert_equal, assert_same_numbers, make_group
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

NUM_STEPS = 2
MICRO_BATCHES = 8
ROWS = 16

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {
    "looped": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Deep(nn.Sequential):
    """As many blocks as there are stages at most; the last stage holds the last layer, too."""

    def __init__(self) -> None:
        super().__init__(*(models.Block(models.WIDTH) for _ in range(8)), nn.Linear(models.WIDTH, 5))


def stage_numbers(schedule: str, rank: int, num_ranks: int) -> list[int]:
    """Return which stages a rank holds."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank] if schedule == "zbv" else [rank, num_ranks + rank]


def train(backend: str, schedule: str) -> Numbers:
    """Train a rank's stages; the first and the last stage are where the inputs and the losses are."""
    group = make_group(backend)
    rank, num_ranks = group.rank(), group.size()
    numbers_of_stages = stage_numbers(schedule, rank, num_ranks)
    num_stages = num_ranks * len(numbers_of_stages)
    model = models.build(Deep)
    layers = list(model.named_children())
    per_stage = (len(layers) - 1) // num_stages
    stages = []
    for number in numbers_of_stages:
        end = len(layers) if number == num_stages - 1 else (number + 1) * per_stage
        part = nn.Sequential()
        for name, layer in layers[number * per_stage : end]:
            part.add_module(name, layer)
        stages.append(PipelineStage(part, number, num_stages, torch.device("cpu"), group=group))
    kind: Any = {**SINGLE, **MULTIPLE}[schedule]
    plan = kind(stages[0] if schedule in SINGLE else stages, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=models.LEARNING_RATE)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        x, y = models.vectors(step, ROWS)
        losses: list[torch.Tensor] = []
        has_last = num_stages - 1 in numbers_of_stages
        plan.step(*((x,) if 0 in numbers_of_stages else ()), target=y if has_last else None, losses=losses)
        if has_last:
            numbers[f"step {step} loss"] = torch.stack(losses).mean().detach()
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                assert parameter.grad is not None
                numbers[f"step {step} gradient {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages:
        numbers |= {f"parameter {name}": p.detach().clone() for name, p in stage.submod.named_parameters()}
    return numbers


def exchange_in_batches(backend: str) -> Numbers:
    """Send to and receive from every other rank at once, several messages of several kinds to each."""
    group = make_group(backend)
    rank, num_ranks = group.rank(), group.size()
    others = [peer for peer in range(num_ranks) if peer != rank]
    operations, numbers = [], {}
    for peer in others:
        for index, dtype in enumerate((torch.float64, torch.int64, torch.bool, torch.bfloat16)):
            size = 3 ** (2 * index)
            sent = (torch.arange(size) % 7 + 10 * rank + peer).to(dtype)
            received = torch.empty(size, dtype=dtype)
            operations += [
                dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
            ]
            numbers[f"{dtype} from {peer}"] = received
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return numbers


SENDS_TO_ITSELF = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 sends shapes from a rank's first stage to its second, which gloo refuses",
)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "schedule", [*SINGLE, *(pytest.param(name, marks=SENDS_TO_ITSELF if name == "zbv" else ()) for name in MULTIPLE)]
)
def test_a_pipeline_trains_as_a_whole_model(schedule: str, num_ranks: int) -> None:
    # Nothing is added over ranks here: both backends have to give the same bits on any number of them.
    per_rank = assert_same_numbers(train, num_ranks, schedule, tolerance=BITWISE)
    joined: Numbers = {}
    for numbers in per_rank:
        assert not joined.keys() & numbers.keys()
        joined |= numbers
    assert_equal(joined, models.plain_steps(Deep, NUM_STEPS, ROWS), PLAIN, "all stages against one plain process")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_exchange_batches_of_messages(num_ranks: int) -> None:
    per_rank = assert_same_numbers(exchange_in_batches, num_ranks, tolerance=BITWISE)
    for rank, numbers in enumerate(per_rank):
        for peer in {peer for peer in range(num_ranks) if peer != rank}:
            assert numbers[f"torch.int64 from {peer}"].tolist() == [i % 7 + 10 * peer + rank for i in range(9)]
