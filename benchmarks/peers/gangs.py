"""A gang: the processes of one side, which stay alive and take a few steps when they are told to.

All sides' gangs live at once and are driven in turn, so that only one computes; the others wait for their next call and
must not take the cores meanwhile, which every gang measures of itself. Waiting alone is not enough: gloo's thread wakes a
hundred times a second for nothing, half a percent of a core for each process, so gangs are stopped while it is not their
turn. Ours are started by our launcher, the others as torchrun would start them.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from plain_ranks import PlainRanks
from runner import prepare, run_block
from side import Side

from meshwright.ranks.launch import RankGroup

LEAD_IN = 1
"""Untimed steps before each block [count]: the gang finds its caches cold, and its ranks get their call one after another."""


def start(side: Side, timeout_s: float) -> RankGroup | PlainRanks:
    environment = dict(side.environment)
    if not side.is_ours or side.source:
        return PlainRanks(side.ranks, threads=side.threads, timeout_s=timeout_s, env=environment)
    return RankGroup(
        side.ranks, threads_per_rank=side.threads, env=environment, timeout_s=timeout_s, start_timeout_s=timeout_s
    )


def mean_of_known(losses: Iterable[float | None]) -> float:
    """Return the mean over the ranks that know their loss; in a pipeline only those of the last stage need to."""
    return statistics.fmean(loss for loss in losses if loss is not None)


class Gang:
    """The processes of one side, from the parent.

    Args:
        side: Which.
        case: The model, see `cases.CASES`.
        optimizer: Its name, see `cases.optimizer_of`.
        num_shares: Shares that the global batch has [count].
        timeout_s: How long one exchange, and the start, may take [s].
        freeze: Whether the processes are stopped (SIGSTOP) while they have nothing to do.
    """

    def __init__(
        self, side: Side, case: str, optimizer: str, num_shares: int, *, timeout_s: float, freeze: bool = True
    ) -> None:
        self.side = side
        self.freeze = freeze
        self.steps_taken = 0
        self.losses: list[float] = []
        self.idle = {"wall_s": 0.0, "cpu_s": 0.0}
        self._arguments = (side, case, optimizer, num_shares)
        self._group = start(side, timeout_s)

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    def prepare(self) -> dict[str, Any]:
        return self._submit(prepare, *self._arguments)[0]

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        results = self._group.submit(function, *arguments)
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: signal.Signals) -> None:
        if self.freeze:
            for pid in self._group.pids:
                os.kill(pid, number)

    def run(self, count: int) -> dict[str, Any]:
        """Run a block of `count` timed steps behind the lead-in, and return its figures."""
        ranks = self._submit(run_block, self.steps_taken, count + LEAD_IN)
        if any(rank["stop"] for rank in ranks):
            raise KeyboardInterrupt(f"a signal asked {self.side.name} to stop")
        self.steps_taken += count + LEAD_IN
        self.losses += [mean_of_known(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
        for name in self.idle:
            self.idle[name] += sum(rank["idle"][name] for rank in ranks)
        # A step ends when the last rank has ended it; the ranks of one host share the clock.
        ends = [max(instants) for instants in zip(*(rank["ends_s"] for rank in ranks), strict=True)]
        steps = [after - before for before, after in zip(ends[LEAD_IN - 1 :], ends[LEAD_IN:], strict=False)]
        return {
            "steps_s": steps,
            "step_s": statistics.median(steps),
            # Memory that the step gives back and takes anew, 4 KiB a fault: it costs as much as the arithmetic on it.
            "page_faults_per_step": max(rank["faults"] for rank in ranks),
            "cores_used": sum(rank["used"]["cpu_s"] for rank in ranks) / max(rank["used"]["wall_s"] for rank in ranks),
        }

    def __enter__(self) -> Gang:
        self._group.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self._group.is_closed:
            self._signal(signal.SIGCONT)  # a stopped process cannot leave by itself
        self._group.__exit__(*exception)
