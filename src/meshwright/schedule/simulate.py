"""Simulation of a schedule: every rank runs its actions in order, each as soon as its inputs are ready."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from meshwright.schedule.action import Action, Milestone, inputs_of, milestone_of

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Start and end of every action of a schedule.

    Args:
        starts: [rank][slot] -> when that action starts [s].
        ends: [rank][slot] -> when it ends [s].
        peak_activations: [rank] -> the most (stage, micro-batch) pairs whose forward is done and whose B or W is not.
        makespan_s: From the first start to the last end [s].
        bubble_fraction: Idle time over step time, over all ranks; 0 to 1.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peak_activations: tuple[int, ...]
    makespan_s: float
    bubble_fraction: float


Times = list[list[tuple[float, float]]]
"""[rank][slot] -> (start, end) of an action that was done; short where the rank is stuck [s]."""


def first_stuck(times: Times, actions: Sequence[Sequence[Action]]) -> tuple[int, int] | None:
    """Return the (rank, slot) of an action that can never start, or None where all of them ran."""
    stuck = [(len(done), rank) for rank, done in enumerate(times) if len(done) < len(actions[rank])]
    return (min(stuck)[1], min(stuck)[0]) if stuck else None


def walk(
    actions: Sequence[Sequence[Action]], num_stages: int, cost: Callable[[Action], float], send_s: float = 0.0
) -> Times:
    """Run every rank's actions in order, until all are done or none can continue.

    Args:
        actions: [rank][slot] -> action.
        num_stages: Stages over all ranks [count].
        cost: Action -> how long it takes [s].
        send_s: From a stage's result to the neighbour that waits on another rank [s].
    """
    times: Times = [[] for _ in actions]
    done: dict[Milestone, tuple[float, int]] = {}
    waiting: defaultdict[Milestone, list[int]] = defaultdict(list)
    runnable = list(range(len(actions)))
    while runnable:
        rank = runnable.pop()
        clock = times[rank][-1][1] if times[rank] else 0.0
        for action in actions[rank][len(times[rank]) :]:
            start = clock
            missing: Milestone | None = None
            for needed in inputs_of(action, num_stages):
                if needed not in done:
                    missing = needed
                    break
                end, producer = done[needed]
                start = max(start, end + (send_s if producer != rank else 0.0))
            if missing is not None:
                waiting[missing].append(rank)
                break
            clock = start + cost(action)
            times[rank].append((start, clock))
            reached = milestone_of(action)
            if reached is not None:
                done[reached] = (clock, rank)
                runnable.extend(waiting.pop(reached, ()))
    return times


def peak_activations(actions: Sequence[Action]) -> int:
    """Return the most (stage, micro-batch) pairs that one rank holds while it does these actions in order."""
    held = peak = 0
    for action in actions:
        held += action.kind == "F"
        peak = max(peak, held)
        held -= action.frees_activations
    return peak
