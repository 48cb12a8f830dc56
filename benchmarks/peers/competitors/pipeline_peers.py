"""Pipelines as torch ships them: the documented front end, a module made by hand for each stage, under its schedules."""

from __future__ import annotations

import functools

import torch
from competitors.deepspeed_peers import DEEPSPEED_PIPELINE, micro_loss
from competitors.layers import stages_of
from side import Batch, MakeOptimizer, Side, Step
from torch import nn


def make_torch_pipeline(model: nn.Module, make_optimizer: MakeOptimizer, *, schedule: str, micro_batches: int) -> Step:
    """torch.distributed.pipelining: one stage a rank, or two where the schedule is of several stages."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(schedule)
    rank, size = dist.get_rank(), dist.get_world_size()
    if issubclass(kind, PipelineScheduleSingle):
        num_stages, mine = size, [rank]
    elif schedule == "ZBVZeroBubble":  # down the ranks and up again: the first rank has the last stage, too
        num_stages, mine = 2 * size, [rank, 2 * size - 1 - rank]
    else:
        num_stages, mine = 2 * size, [rank, rank + size]
    parts = stages_of(model, num_stages)
    stages = [PipelineStage(parts[index], index, num_stages, torch.device("cpu")) for index in mine]
    run = kind(stages[0] if num_stages == size else stages, micro_batches, loss_fn=micro_loss)  # pyright: ignore
    optimizer = make_optimizer([parameter for index in mine for parameter in parts[index].parameters()])
    is_first, is_last = 0 in mine, num_stages - 1 in mine

    def step(batch: Batch) -> float | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (batch[0],) if is_first else ()
        targets = {"target": batch[1], "losses": losses} if is_last else {}
        run.step(*inputs, return_outputs=False, **targets)
        optimizer.step()
        return torch.stack(losses).mean().item() if is_last else None

    return step


def torch_pipeline(name: str, schedule: str) -> Side:
    make = functools.partial(make_torch_pipeline, schedule=schedule)
    return Side(f"torch-{name}", make, "gloo", shares_batch=True, in_micro_batches=True)


PIPELINES = (
    torch_pipeline("gpipe", "GPipe"),
    torch_pipeline("1f1b", "1F1B"),
    torch_pipeline("interleaved", "Interleaved1F1B"),
    torch_pipeline("zbv", "ZBVZeroBubble"),
    DEEPSPEED_PIPELINE,
)
