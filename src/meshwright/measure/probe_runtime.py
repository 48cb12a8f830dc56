"""Times that this project's own steps add to a model's operators: plans on next to nothing, beside a plain loop.

A step of two sizes of a small model gives what it takes in any case, and what each layer or parameter adds.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.measure.probe_sizes import (
    AT_LEAST,
    BUDGET_S,
    FEW_BLOCKS,
    FEW_LAYERS,
    MANY_BLOCKS,
    MANY_LAYERS,
    RUNTIME_MICRO_BATCHES,
    RUNTIME_STEPS,
)
from meshwright.ranks.world import World, current_world
from meshwright.run.applying import apply_plan

__all__: list[str] = []

_ROWS = 4
_WIDTH = 8
_WARM_UP = 5
_TENSORS = 2
"""Parameters of a layer [count]."""
_CALLS = 8
"""Of a model's own code behind each layer [count]."""
_EXCHANGES = 4
"""Of a block under tensor parallelism: its input is gathered and its result scattered, and again in backward [count]."""


def measure_runtime(world: World, budget_s: float) -> dict[str, Any]:
    """Return, for each kind of work, what it takes in any case and for each layer or parameter, and 0 as the spread [s].

    Every rank of the world calls it, with the same budget. The kinds are those of `Efficiency.runtime`.
    """
    num_steps = max(AT_LEAST, round(RUNTIME_STEPS * min(1.0, budget_s / BUDGET_S)))
    ranks = world.world_size
    sizes = FEW_LAYERS, MANY_LAYERS
    plain = _Times(*(_plain(world, functools.partial(_build, size), num_steps) for size in sizes))
    forward, passes, optimizer = plain.each()
    found: dict[str, tuple[float, float]] = {}
    of_plan = functools.partial(_of_plan, num_steps)
    step = of_plan(f"dp={ranks}" if ranks > 1 else "single")
    whole = [one + other for one, other in zip(passes, optimizer, strict=True)]
    found["step"] = _line(_less(step, whole))
    again = of_plan(f"dp={ranks},recompute=full")
    found["recompute"] = _line(_less(again, step, forward))
    if ranks > 1:
        sharded = of_plan(f"dp={ranks},zero=3")
        found["zero"] = _line(_less(sharded, step), each=_TENSORS)
        found |= _of_pipeline(of_plan, ranks, passes, optimizer, found["step"])
        found["between"] = _of_between(world, num_steps)
        if 4 * _WIDTH % ranks == 0:  # as many columns for each
            found["tensor"] = _of_tensor(num_steps, world)
    return {f"runtime_{kind}": (list(numbers), 0.0) for kind, numbers in found.items()}


def _of_pipeline(
    of_plan: Callable[..., list[float]],
    ranks: int,
    passes: list[float],
    optimizer: list[float],
    step: tuple[float, float],
) -> dict[str, tuple[float, float]]:
    """Return what a stage adds for each micro-batch, by layers of the whole model; and gradients in halves, by its own layers."""
    count = RUNTIME_MICRO_BATCHES * ranks
    plain = of_plan(f"pp={ranks},micro_batches={count}", rows=count)
    halves = of_plan(f"pp={ranks},schedule=zb-h1,micro_batches={count}", rows=count)
    rounds = count + ranks - 1  # the last rank waits for its first micro-batch
    once = [step[0] + one / ranks for one in optimizer]
    stage = [(one - at_end) / rounds - own / ranks for one, at_end, own in zip(plain, once, passes, strict=True)]
    more = [(one - other) / count for one, other in zip(halves, plain, strict=True)]
    return {"stage": _line(stage), "half": _line(more, each=1 / ranks)}


def _of_between(world: World, num_steps: int) -> tuple[float, float]:
    """Return what a call between the layers adds to a stage for each micro-batch, beside itself [s]."""
    ranks, count = world.world_size, RUNTIME_MICRO_BATCHES * world.world_size
    builds = [functools.partial(_Between, FEW_LAYERS, calls) for calls in (0, _CALLS)]
    without, plain = (_plain(world, build, num_steps)[1] for build in builds)
    batch = _batch(_ROWS * count)
    none, some = (_time_plan(num_steps, f"pp={ranks},micro_batches={count}", build, batch) for build in builds)
    of_stage = (some - none) / (count + ranks - 1) - (plain - without) / ranks
    return 0.0, max(0.0, of_stage) / (FEW_LAYERS * _CALLS)


def _of_tensor(num_steps: int, world: World) -> tuple[float, float]:
    """Return what tensor parallelism adds to a step, and to each of its exchanges, their own time included [s]."""
    sizes = FEW_BLOCKS, MANY_BLOCKS
    cut, whole = (
        [
            _time_plan(num_steps, f"{axis}={world.world_size}", functools.partial(_build_blocks, size), _stream(share))
            for size in sizes
        ]
        for axis, share in (("tp", 0), ("dp", world.rank))
    )
    few, many = (max(0.0, one) for one in _less(cut, whole))
    slope = max(0.0, many - few) / (MANY_BLOCKS - FEW_BLOCKS)
    return max(0.0, few - slope * FEW_BLOCKS), slope / _EXCHANGES


def _line(seconds: list[float], *, each: float = 1.0) -> tuple[float, float]:
    """Return what is there in any case, and for each of ``each`` times the layers, from times of few and of many layers."""
    few, many = (max(0.0, one) for one in seconds)
    slope = max(0.0, many - few) / (MANY_LAYERS - FEW_LAYERS)
    return max(0.0, few - slope * FEW_LAYERS), slope / each


def _less(seconds: list[float], *others: list[float]) -> list[float]:
    return [one - sum(rest) for one, *rest in zip(seconds, *others, strict=True)]


class _Times:
    """Times of a plain loop over few and many layers: forward, forward and backward, and the optimizer's step."""

    def __init__(self, few: tuple[float, ...], many: tuple[float, ...]) -> None:
        self._few, self._many = few, many

    def each(self) -> tuple[list[float], list[float], list[float]]:
        """Return the three, each as [of few layers, of many]."""
        forward, passes, optimizer = ([few, many] for few, many in zip(self._few, self._many, strict=True))
        return forward, passes, optimizer


def _plain(world: World, build: Callable[[], nn.Module], num_steps: int) -> tuple[float, float, float]:
    model = build()
    optimizer = _make_optimizer(model.parameters())
    batch = _batch(_ROWS)
    marks: list[tuple[float, float, float]] = []
    world.default_group.barrier()
    for _ in range(_WARM_UP + num_steps):
        start = time.perf_counter()
        loss = _loss(model(batch[0]), batch)
        middle = time.perf_counter()
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        marks.append((middle - start, before - start, time.perf_counter() - before))
    forward, passes, update = (_quartile(list(one)) for one in zip(*marks[_WARM_UP:], strict=True))
    return forward, passes, update


def _of_plan(num_steps: int, plan: str, rows: int = 1) -> list[float]:
    """Return the time of a step under a plan, of few and of many layers, each rank with as many rows for a micro-batch [s]."""
    world = current_world()  # each replica has a share of its own, stages all have the same
    share = world.rank if world is not None and plan.startswith("dp=") else 0
    batch = _batch(_ROWS * rows, share)
    return [_time_plan(num_steps, plan, functools.partial(_build, size), batch) for size in (FEW_LAYERS, MANY_LAYERS)]


def _time_plan(num_steps: int, plan: str, build: Callable[[], nn.Module], batch: Any) -> float:
    """Return the time of a step of a model under a plan [s]."""
    with apply_plan(build, plan, loss_fn=_loss, optimizer=_make_optimizer) as model:
        return _time_steps(lambda: model.step(batch), num_steps)


def _time_steps(step: Callable[[], object], num_steps: int) -> float:
    samples: list[float] = []
    for _ in range(_WARM_UP + num_steps):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return _quartile(samples[_WARM_UP:])


def _quartile(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=4)[0]


class _Between(nn.Module):
    """Layers with so many calls of the model's own code behind each."""

    def __init__(self, num_layers: int, calls: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers))
        self.calls = calls

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
            for _ in range(self.calls):
                values = values * 0.9
        return values


class _TensorBlock(nn.Module):
    """A layer with one pair of products to cut, around which the stream may lie in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.narrow(F.relu(self.wide(self.norm(stream))))


def _build_blocks(num_blocks: int) -> nn.Module:
    return nn.Sequential(*(_TensorBlock() for _ in range(num_blocks)))


def _stream(share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of a sequence each, and targets."""
    shape = (_ROWS, _ROWS, _WIDTH)
    return torch.linspace(0.0, 1.0 + share, math.prod(shape)).view(shape), torch.zeros(shape)


def _build(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))


def _batch(rows: int, share: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, _WIDTH), 1.0 + share), torch.zeros(rows, _WIDTH)


def _make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def _loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(outputs, batch[1])
