"""Stages of a pipeline: a balanced cut of layers, and the time that a schedule takes over them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

__all__: list[str] = []

_SLACK: Final = 0.01
"""By how much the costliest stage may exceed the least that it can cost [ratio]."""


def balanced_cut(prefix: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return where stages begin and the last one ends, so that the costliest of them costs as little as it can, within 1 %.

    Args:
        prefix: Sums of the layers' costs: 0, the first, the first two, and so on [any one unit].
        num_stages: Stages, at most the layers [count].

    Returns:
        Index of the first layer of each stage, and the number of layers.

    >>> balanced_cut([0, 1, 2, 3, 6], 2)
    (0, 3, 4)
    """
    num_layers = len(prefix) - 1
    if num_stages == 1:
        return (0, num_layers)
    low, high = prefix[-1] / num_stages, prefix[-1]
    for _ in range(24):
        middle = (low + high) / 2
        if _cut(prefix, middle, num_stages) is not None:
            high = middle
        else:
            low = middle
    # A little slower is good enough where the first stage, which holds the most micro-batches, gets less to hold.
    best = _cut(prefix, high * (1 + _SLACK), num_stages) or _cut(prefix, high, num_stages)
    return best or (*range(num_stages), num_layers)


def _cut(prefix: Sequence[float], limit: float, num_stages: int) -> tuple[int, ...] | None:
    """Return a cut into stages that cost at most ``limit``, each with a layer; None where there is none.

    Stages are filled from the last one, so that the first one has what is left: it holds the most micro-batches.
    """
    num_layers = len(prefix) - 1
    limit *= 1 + 1e-12
    bounds = [num_layers]
    for left in range(num_stages - 1, 0, -1):
        end = bounds[-1]
        start = max(bisect.bisect_left(prefix, prefix[end] - limit), left)
        if start >= end:
            return None
        bounds.append(start)
    if prefix[bounds[-1]] > limit:
        return None
    return (0, *reversed(bounds))


def rank_of_stage(stage: int, num_ranks: int, schedule: str) -> int:
    """Return the pp rank that runs a stage: in turn, and back again in zbv's V."""
    if schedule == "zbv":
        return stage if stage < num_ranks else 2 * num_ranks - 1 - stage
    return stage % num_ranks


def pipeline_s(
    busy: Sequence[float], *, micro_batches: int, virtual: int, schedule: str, weight_fraction: float, send_s: float
) -> tuple[float, float]:
    """Return the time of all micro-batches, and of it the bubble [s].

    Args:
        busy: Seconds that each pp rank computes for one micro-batch [s].
        micro_batches: Micro-batches of the step [count].
        virtual: Stages of a rank [count].
        schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv or sequential.
        weight_fraction: Share of the time that gradients of weights take, which zero-bubble schedules defer.
        send_s: A message to the next rank [s].

    Source:
        Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1F1B and interleaved: (p - 1) / v of a micro-batch's time); Qi et
        al. 2023, arXiv:2401.10241, section 2 (ZB-H1 leaves a third of 1F1B's bubble, ZB-H2 next to none). What
        ZB-V leaves, and what both leave with fewer micro-batches than ranks, is what `PipelineSchedule.simulate` says.
    """
    ranks = len(busy)
    slowest = max(busy)
    if ranks == 1:
        return micro_batches * slowest, 0.0
    others = sum(busy) - slowest
    if schedule == "sequential":
        return micro_batches * sum(busy), micro_batches * others
    deferred = {"zb-h1": 2, "zb-h2": 3, "zbv": 3}.get(schedule, 0)
    # A zero-bubble schedule fills its gaps with gradients of weights, others fill none.
    fill = others * max(0.0, 1 - deferred * weight_fraction) / (virtual if schedule == "interleaved" else 1)
    fill += 2 * (ranks - 1) * send_s
    if schedule == "zbv":  # the first micro-batch goes down one leg of the V before the last rank has work
        fill += others * weight_fraction / 2
    if schedule in ("zb-h1", "zbv"):  # there are as many such gradients as micro-batches
        fill += max(0, ranks - micro_batches) * slowest * weight_fraction
    # A rank with fewer micro-batches than ranks starves even where stages are interleaved.
    steady = micro_batches * slowest
    return steady + fill, fill
