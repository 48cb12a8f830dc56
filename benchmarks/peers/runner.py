"""What runs on the ranks of every side: build the side, take blocks of steps, say what they took."""

from __future__ import annotations

import gc
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import MICRO_BATCHES, make_batch, optimizer_of
from side import Batch, Side, Step, versions


class _Runner:
    """One rank's share of a side."""

    def __init__(self, side: Side, case: str, optimizer: str, num_shares: int) -> None:
        backend = dist.get_backend() if dist.is_initialized() else None
        if backend != side.backend:
            raise RuntimeError(f"{side.name} was to run on {side.backend}, and its default group is {backend}")
        self._check_source(side)
        self.case = case
        # One process alone takes the shares of all ranks of the other sides.
        takes_all = backend is None or side.shares_batch
        self.shares = range(num_shares) if takes_all else [dist.get_rank()]
        torch.manual_seed(0)
        model = side.build(case)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        more = {"micro_batches": MICRO_BATCHES[case]} if side.in_micro_batches else {}
        self.step: Step = side.make(model, optimizer_of(optimizer), **more)
        self.idle_since = (time.perf_counter(), time.process_time())

    @staticmethod
    def _check_source(side: Side) -> None:
        if side.source is not None:
            import meshwright

            found = Path(meshwright.__file__).resolve()
            if not found.is_relative_to(side.source.resolve()):
                raise RuntimeError(f"{side.name} was to run the code of {side.source}, and runs {found}")

    def batch(self, step: int) -> Batch:
        ids, labels = zip(*(make_batch(self.case, share, step) for share in self.shares), strict=True)
        return torch.cat(ids), torch.cat(labels)

    def run(self, first: int, count: int) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        idle = {"wall_s": wall - self.idle_since[0], "cpu_s": cpu - self.idle_since[1]}
        batches = [self.batch(step) for step in range(first, first + count)]
        gc.collect()  # here rather than in a step: every side starts its block with the same debts
        losses, ends = [], []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for batch in batches:
            losses.append(self.step(batch))
            ends.append(time.perf_counter())
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / count
        self.idle_since = (time.perf_counter(), time.process_time())
        used = {"wall_s": self.idle_since[0] - wall, "cpu_s": self.idle_since[1] - cpu}
        return {"losses": losses, "ends_s": ends, "idle": idle, "used": used, "faults": faults, "stop": _is_to_stop()}


def _is_to_stop() -> bool:
    """Whether our launcher has passed on a signal that asks to stop; the other sides' ranks are ended by the parent."""
    if "meshwright" not in sys.modules:
        return False
    import meshwright as mw

    world = mw.current_world()
    return world is not None and world.stop_requested()


_runner: _Runner | None = None  # what `prepare` made, for the calls of `run_block` on the same rank


def prepare(side: Side, case: str, optimizer: str, num_shares: int) -> dict[str, Any]:
    """Build the side on this rank, and say what it is."""
    global _runner
    _runner = _Runner(side, case, optimizer, num_shares)
    return {
        "num_parameters": _runner.num_parameters,
        "versions": versions(side),
        "threads": torch.get_num_threads(),
        "backend": side.backend,
    }


def run_block(first: int, count: int) -> dict[str, Any]:
    """Take `count` steps, the first of which has the number `first`."""
    if _runner is None:
        raise RuntimeError("prepare comes first")
    return _runner.run(first, count)
