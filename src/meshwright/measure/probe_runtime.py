"""Times that this project's own steps add to a model's operators: plans on next to nothing, beside a plain loop.

A step of two sizes of a small model gives what it takes in any case, and what each layer or parameter adds. What is added is
a small difference of two times, so it is taken turn by turn; one turn in which a core stood still for 100 ms does not count.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import numpy as np
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
    added,
)
from meshwright.ranks.world import World
from meshwright.run.applying import apply_plan

__all__: list[str] = []

Turns: TypeAlias = np.ndarray
"""Times of one thing, turn by turn [s]."""

_ROWS = 4
_WIDTH = 8
_WARM_UP = 4
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
    ranks, has_tensor = world.world_size, world.world_size > 1 and 4 * _WIDTH % world.world_size == 0
    count = RUNTIME_MICRO_BATCHES * ranks
    with _Steps(world) as steps:
        steps.add_plain("plain")
        steps.add_sizes("step", f"dp={ranks}" if ranks > 1 else "single")
        steps.add_sizes("again", f"dp={ranks},recompute=full")
        if ranks > 1:
            steps.add_sizes("sharded", f"dp={ranks},zero=3")
            steps.add_sizes("pipeline", f"pp={ranks},micro_batches={count}", rows=count)
            steps.add_sizes("halves", f"pp={ranks},schedule=zb-h1,micro_batches={count}", rows=count)
            for calls in (0, _CALLS):
                steps.add_between(calls, f"pp={ranks},micro_batches={count}", rows=count)
        if has_tensor:  # as many columns for each
            steps.add_blocks("whole", f"dp={ranks}", world.rank)
            steps.add_blocks("cut", f"tp={ranks}", 0)
        times = steps.measure(num_steps)
    forward, passes, optimizer = times["plain forward"], times["plain passes"], times["plain optimizer"]
    found: dict[str, tuple[float, float]] = {}
    found["step"] = _line(_less(times["step"], passes, optimizer))
    found["recompute"] = _line(_less(times["again"], times["step"], forward))
    if ranks > 1:
        found["zero"] = _line(_less(times["sharded"], times["step"]), each=_TENSORS)
        once = [found["step"][0] + one / ranks for one in optimizer]
        found |= _of_pipeline(times, passes, once, ranks)
        found["between"] = _of_between(times, ranks)
    if has_tensor:
        found["tensor"] = _of_tensor(_less(times["cut"], times["whole"]))
    return {f"runtime_{kind}": (list(numbers), 0.0) for kind, numbers in found.items()}


def _of_pipeline(
    times: Mapping[str, list[Turns]], passes: list[Turns], once: list[Turns], ranks: int
) -> dict[str, tuple[float, float]]:
    """Return what a stage adds for each micro-batch, by layers of the whole model; and gradients in halves, by its own layers."""
    count = RUNTIME_MICRO_BATCHES * ranks
    rounds = count + ranks - 1  # the last rank waits for its first micro-batch
    plain, halves = times["pipeline"], times["halves"]
    stage = [(one - at_end) / rounds - own / ranks for one, at_end, own in zip(plain, once, passes, strict=True)]
    more = [(one - other) / count for one, other in zip(halves, plain, strict=True)]
    return {"stage": _line(stage), "half": _line(more, each=1 / ranks)}


def _of_between(times: Mapping[str, list[Turns]], ranks: int) -> tuple[float, float]:
    """Return what a call between the layers adds to a stage for each micro-batch, beside itself [s]."""
    count = RUNTIME_MICRO_BATCHES * ranks
    none, some = (times[f"between {calls}"][0] for calls in (0, _CALLS))
    without, plain = (times[f"between {calls} passes"][0] for calls in (0, _CALLS))
    of_stage = (some - none) / (count + ranks - 1) - (plain - without) / ranks
    return 0.0, added(of_stage) / (FEW_LAYERS * _CALLS)


def _of_tensor(more: list[Turns]) -> tuple[float, float]:
    """Return what tensor parallelism adds to a step, and to each of its exchanges, their own time included [s]."""
    few, many = map(added, more)
    slope = max(0.0, many - few) / (MANY_BLOCKS - FEW_BLOCKS)
    return max(0.0, few - slope * FEW_BLOCKS), slope / _EXCHANGES


def _line(seconds: list[Turns], *, each: float = 1.0) -> tuple[float, float]:
    """Return what is there in any case, and for each of ``each`` times the layers, from times of few and of many layers."""
    few, many = map(added, seconds)
    slope = max(0.0, many - few) / (MANY_LAYERS - FEW_LAYERS)
    return max(0.0, few - slope * FEW_LAYERS), slope / each


def _less(seconds: list[Turns], *others: list[Turns]) -> list[Turns]:
    return [one - sum(rest) for one, *rest in zip(seconds, *others, strict=True)]


class _Steps:
    """Steps of small models, plain and under plans, one of each in turn.

    A virtual machine's cores are slower by a third for seconds at a time, so times whose difference counts are taken side by
    side; and what a model's step has left in the caches is no longer there at its next, as in the training of a larger one.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._models = contextlib.ExitStack()
        self._steps: list[tuple[tuple[str, ...], Callable[[], tuple[float, ...]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: Any) -> None:
        self._models.__exit__(*details)

    def add_plain(self, name: str) -> None:
        """Add plain loops over few and many layers, as "<name> forward", "<name> passes" (with backward), "<name> optimizer"."""
        for size in (FEW_LAYERS, MANY_LAYERS):
            self._add_loop(name, functools.partial(_build, size))

    def add_sizes(self, name: str, plan: str, rows: int = 1) -> None:
        """Add a plan on few and on many layers, each rank with as many rows for a micro-batch."""
        # Each replica has a share of its own, stages all have the same.
        batch = _batch(_ROWS * rows, self._world.rank if plan.startswith("dp=") else 0)
        for size in (FEW_LAYERS, MANY_LAYERS):
            self._add_plan(name, plan, functools.partial(_build, size), batch)

    def add_between(self, calls: int, plan: str, rows: int) -> None:
        """Add a plan, and a plain loop, on layers with so many calls behind each, as "between <calls>"."""
        build = functools.partial(_Between, FEW_LAYERS, calls)
        self._add_plan(f"between {calls}", plan, build, _batch(_ROWS * rows))
        self._add_loop(f"between {calls}", build)

    def add_blocks(self, name: str, plan: str, share: int) -> None:
        """Add a plan on few and on many blocks that tensor parallelism cuts."""
        for size in (FEW_BLOCKS, MANY_BLOCKS):
            self._add_plan(name, plan, functools.partial(_build_blocks, size), _stream(share))

    def measure(self, num_steps: int) -> dict[str, list[Turns]]:
        """Return the times of each name, turn by turn, in the order in which its models were added [s]. Every rank calls it."""
        samples: list[list[tuple[float, ...]]] = [[] for _ in self._steps]
        for turn in range(_WARM_UP + num_steps):
            for (_, step), own in zip(self._steps, samples, strict=True):
                self._world.default_group.barrier()
                seconds = step()
                if turn >= _WARM_UP:
                    own.append(seconds)
        found: dict[str, list[Turns]] = {}
        for (names, _), own in zip(self._steps, samples, strict=True):
            for name, column in zip(names, zip(*own, strict=True), strict=True):
                found.setdefault(name, []).append(np.array(column))
        return found

    def _add_loop(self, name: str, build: Callable[[], nn.Module]) -> None:
        model, batch = build(), _batch(_ROWS)
        optimizer = _make_optimizer(model.parameters())

        def step() -> tuple[float, ...]:
            start = time.perf_counter()
            loss = _loss(model(batch[0]), batch)
            middle = time.perf_counter()
            loss.backward()
            before = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            return middle - start, before - start, time.perf_counter() - before

        self._steps.append(((f"{name} forward", f"{name} passes", f"{name} optimizer"), step))

    def _add_plan(self, name: str, plan: str, build: Callable[[], nn.Module], batch: Any) -> None:
        applied = apply_plan(build, plan, loss_fn=_loss, optimizer=_make_optimizer)
        model = self._models.enter_context(applied)

        def step() -> tuple[float, ...]:
            start = time.perf_counter()
            model.step(batch)
            return (time.perf_counter() - start,)

        self._steps.append(((name,), step))


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
