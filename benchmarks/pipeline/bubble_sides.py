"""What runs on the ranks: our pipelines and torch.distributed.pipelining's, each over the same timed model."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from timed_model import NUM_BLOCKS, Clock, Times, build, loss_of, make_batch

NUM_RANKS = 4
NUM_MICRO_BATCHES = 8
SAMPLES = 2
LEARNING_RATE = 0.01
Kind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]
VIRTUAL: dict[Kind, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
"""Schedule -> stages a rank."""
THEIRS: dict[Kind, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""Our schedule's name -> torch's class; ScheduleInterleavedZeroBubble is ZB-H1 where a rank has one stage."""
Step = Callable[[tuple[torch.Tensor, torch.Tensor]], float | None]
Orders = list[list[str]]


def deal(kind: Kind) -> list[range]:
    """Return each stage's layers in the model, of which the first is the table."""
    num_stages = NUM_RANKS * VIRTUAL[kind]
    per_stage = NUM_BLOCKS // num_stages
    return [range(stage * per_stage + (stage > 0), (stage + 1) * per_stage + 1) for stage in range(num_stages)]


def make_ours(kind: Kind, clock: Clock) -> tuple[Step, Orders]:
    import meshwright as mw

    line = f"pp={NUM_RANKS},micro_batches={NUM_MICRO_BATCHES},schedule={kind},virtual={VIRTUAL[kind]}"
    plan = mw.Plan.parse(line, NUM_RANKS).replace(
        stages={str(place): stage for stage, places in enumerate(deal(kind)) for place in places}
    )
    model = mw.apply_plan(
        build(clock),
        plan,
        loss_fn=lambda outputs, batch: loss_of(outputs, batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    )
    schedule = mw.PipelineSchedule.build(
        kind, num_ranks=NUM_RANKS, num_micro_batches=NUM_MICRO_BATCHES, virtual=VIRTUAL[kind]
    )
    return lambda batch: model.step(batch).loss, [[str(action) for action in row] for row in schedule.actions]


def make_theirs(kind: Kind, clock: Clock) -> tuple[Step, Orders]:
    from torch.distributed import pipelining

    rank, virtual = dist.get_rank(), VIRTUAL[kind]
    num_stages = NUM_RANKS * virtual
    own = [rank, num_stages - 1 - rank] if kind == "zbv" else [rank + chunk * NUM_RANKS for chunk in range(virtual)]
    layers, places = build(clock), deal(kind)
    modules = [layers[places[stage].start : places[stage].stop] for stage in own]
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for stage, module in zip(own, modules, strict=True)
    ]
    is_single = kind in ("gpipe", "1f1b")
    make = getattr(pipelining, THEIRS[kind])
    schedule = make(stages[0] if is_single else stages, NUM_MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=LEARNING_RATE)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float | None:
        losses: list[torch.Tensor] = []
        is_last = num_stages - 1 in own
        optimizer.zero_grad()
        schedule.step(*batch[: 0 in own], **({"target": batch[1], "losses": losses} if is_last else {}))
        optimizer.step()
        return torch.stack(losses).mean().item() if is_last else None

    order = {} if is_single else schedule.pipeline_order  # the two plain ones have no order that they run by
    return step, [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


_sides: dict[Kind, tuple[Step, Clock]] = {}  # what `prepare` made, for the calls of `run_block` on the same rank


def prepare(is_ours: bool, backend: str, kinds: list[Kind], times: Times) -> dict[Kind, Orders]:
    """Build every schedule on this rank; return their orders, where they have one."""
    if dist.get_backend() != backend:
        raise RuntimeError(f"this side was to run on {backend}, and its default group is {dist.get_backend()}")
    torch.set_num_threads(1)
    orders: dict[Kind, Orders] = {}
    for kind in kinds:
        clock = Clock(times)
        step, orders[kind] = (make_ours if is_ours else make_theirs)(kind, clock)
        _sides[kind] = (step, clock)
    return orders


def run_block(kind: Kind, first: int, count: int) -> list[dict[str, Any]]:
    """Take `count` steps, the first of which has the number `first`."""
    step, clock = _sides[kind]
    batches = [make_batch(number, NUM_MICRO_BATCHES * SAMPLES) for number in range(first, first + count)]
    gc.collect()
    clock.take()
    steps: list[dict[str, Any]] = []
    for batch in batches:
        used = time.process_time()
        loss = step(batch)
        end, used = time.perf_counter(), time.process_time() - used
        steps.append({"loss": loss, "end_s": end, "cpu_s": used, "slept": clock.take()})
    return steps
