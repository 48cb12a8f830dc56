"""Steps that are traced: beside the ledger's counts, beside other steps, with clocks that differ, with timed sleeps."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.parity import cases
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm.communicator import Communicator
from meshwright.run.step_trace import StepTrace

_SGD = functools.partial(torch.optim.SGD, lr=0.05)


def traced_and_counted(name: str, plan: str, path: str) -> dict[str, Any]:
    """Return what the ledger counted in two traced steps, and their losses beside those of a run without a trace."""
    case = cases.CASES[name]
    losses: list[list[float]] = []
    counted: dict[str, list[int]] = {}
    for is_traced in (False, True):
        with mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=_SGD, sentinel_every=0) as model:
            batches = [mw.split_batch(batch, model) for batch in case.batches(8)]
            found = [model.step(batches[0]).loss]
            if is_traced:
                before = model.ledger.snapshot()
                with mw.trace_steps(model, path):
                    found += [model.step(batch).loss for batch in batches[1:]]
                for (collective, axis), entry in model.ledger.since(before).items():
                    if model.ledger.recorder is None and collective != "to":
                        counted[f"{collective} {axis}"] = [entry.num_calls, entry.tensor_bytes]
            else:
                found += [model.step(batch).loss for batch in batches[1:]]
            losses.append(found)
    return {"counted": counted, "losses": losses}


def profiled(name: str, plan: str, path: str) -> tuple[list[float], str]:
    """Trace two steps with torch.profiler added; return their losses, and what tracing raises beside rank 0's own profiler."""
    case = cases.CASES[name]
    with mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=_SGD, sentinel_every=0) as model:
        batches = [mw.split_batch(batch, model) for batch in case.batches(8)]
        losses = [model.step(batches[0]).loss]
        with mw.trace_steps(model, path, profiler=True):
            losses += [model.step(batch).loss for batch in batches[1:]]
        text = ""
        on_one_rank = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with on_one_rank if model.world.rank == 0 else contextlib.nullcontext():
            try:
                with mw.trace_steps(model, path, profiler=True):
                    pass
            except mw.ApplyError as error:
                text = error.message
        return losses, text


def with_other_clocks(name: str, plan: str, offsets_ns: list[int], drift: float) -> dict[str, Any] | None:
    """Trace a step with clocks that are off by so much, and that drift from each other; rank 0 returns the trace."""
    case = cases.CASES[name]
    with mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=_SGD) as model:
        batch = mw.split_batch(case.batches(8)[0], model)
        model.step(batch)
        rank = model.world.rank
        began = time.monotonic_ns()

        def clock() -> int:
            now = time.monotonic_ns()
            return now + offsets_ns[rank] + round(rank * drift * (now - began))

        trace = StepTrace(model, clock=clock, clock_name=f"clock {rank}")
        trace.begin()
        for _ in range(3):
            model.step(batch)
            model.world.default_group.barrier()
        return trace.end()


def raised_inside(name: str, plan: str, path: str) -> tuple[bool, str]:
    """Raise inside of a trace, and take a step after it; return whether nothing is recorded, and what a second trace raises."""
    case = cases.CASES[name]
    with mw.apply_plan(case.build, plan, loss_fn=case.loss_fn, optimizer=_SGD) as model:
        batch = mw.split_batch(case.batches(8)[0], model)
        try:
            with mw.trace_steps(model, path):
                raise KeyError("from the script")
        except KeyError:
            pass
        model.step(batch)
        is_off = model.ledger.recorder is None and not Path(path).exists()
        text = ""
        with mw.trace_steps(model, path):
            try:
                with mw.trace_steps(model, path):
                    pass
            except mw.ApplyError as error:
                text = error.message
        return is_off, text


class Stopwatch:
    """Sums the time for which this rank stands still for others, beside the ledger and the trace."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._plain = Communicator.run_waiting

    def __enter__(self) -> Stopwatch:
        def run_waiting(group: Communicator, name: str, wait: Callable[[], Any], *details: Any) -> Any:
            begin = time.monotonic()
            try:
                return self._plain(group, name, wait, *details)
            finally:
                self.wait_s += time.monotonic() - begin

        Communicator.run_waiting = run_waiting
        return self

    def __exit__(self, *_: object) -> None:
        Communicator.run_waiting = self._plain


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None, None


class Sleeping(nn.Module):
    """A layer that takes a given time forward, and another backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), *self.seconds)  # pyright: ignore[reportReturnType]


def sleep_in_stages(path: str, forward_s: float, backward_s: float, micro_batches: int, num_steps: int) -> list[Any]:
    """Trace steps of four sleeping stages; return each step's begin, end and waiting, by this rank's own watch [s]."""
    pair = (torch.zeros(micro_batches, 4), torch.zeros(micro_batches, 4))
    with mw.apply_plan(
        lambda: nn.Sequential(*[Sleeping(forward_s, backward_s) for _ in range(4)]),
        f"pp=4,micro_batches={micro_batches}",
        loss_fn=lambda outputs, batch: ((outputs - batch[1]) ** 2).mean(),
        optimizer=_SGD,
        example_batch=pair,
    ) as model:
        batch = mw.split_batch(pair, model)
        model.step(batch)
        found: list[Any] = []
        with mw.trace_steps(model, path), Stopwatch() as stopwatch:
            for _ in range(num_steps):
                stopwatch.wait_s = 0.0
                begin = time.monotonic()
                model.step(batch)
                found.append([begin, time.monotonic(), stopwatch.wait_s])
        return found


def read(path: str) -> Any:
    """Return the trace in a file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))
