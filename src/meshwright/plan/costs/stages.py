"""Stages of a pipeline: a balanced cut of layers, and the time that a schedule takes over them."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Sequence
from typing import Final

from meshwright.plan.costs.setup import Setup
from meshwright.schedule.balance import balance_layers, balance_over_ranks, work_of
from meshwright.spec.model import ModelSpec

__all__: list[str] = []

_SLACK: Final = 0.01
"""By how much the costliest stage may exceed the least that it can cost [ratio]."""

_ASYNCHRONOUS: Final = 0.3
"""Share of a message between stages that is not hidden where messages are posted ahead. An estimate [ratio]."""

_WEIGHT_FRACTION: Final = 1 / 3
"""Share of forward and backward that gradients of weights take: one of three products [ratio]."""

_MARGIN: Final = 1e-9
"""By how much less than a cost is certainly too little for it, however sums were rounded [ratio]."""


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
    # A cut says what its stages cost, and a failed one what they lack: few of the halves have to be tried.
    enough, too_little = math.inf, 0.0
    for _ in range(24):
        middle = (low + high) / 2
        is_enough = middle >= enough
        if too_little <= middle < enough:
            bounds, is_enough = _fill(prefix, middle, num_stages)
            if is_enough:
                enough = max(
                    map(operator.sub, map(prefix.__getitem__, bounds), map(prefix.__getitem__, [*bounds[1:], 0]))
                )
            else:
                too_little = _next_limit(prefix, bounds, num_stages) * (1 - _MARGIN)
        low, high = (low, middle) if is_enough else (middle, high)
    # A little slower is good enough where the first stage, which holds the most micro-batches, gets less to hold.
    best = _cut(prefix, high * (1 + _SLACK), num_stages) or _cut(prefix, high, num_stages)
    return best or (*range(num_stages), num_layers)


def _cut(prefix: Sequence[float], limit: float, num_stages: int) -> tuple[int, ...] | None:
    """Return a cut into stages that cost at most ``limit``, each with a layer; None where there is none."""
    bounds, is_enough = _fill(prefix, limit, num_stages)
    return (0, *reversed(bounds)) if is_enough else None


def _fill(prefix: Sequence[float], limit: float, num_stages: int) -> tuple[list[int], bool]:
    """Return where stages that cost at most ``limit`` end, the last one first, and whether they hold all layers.

    Stages are filled from the last one, so that the first one has what is left: it holds the most micro-batches.
    """
    limit *= 1 + 1e-12
    end = len(prefix) - 1
    bounds = [end]
    for left in range(num_stages - 1, 0, -1):
        start = bisect.bisect_left(prefix, prefix[end] - limit, left, end)
        if start >= end:
            return bounds, False
        bounds.append(start)
        end = start
    return bounds, prefix[end] <= limit


def _next_limit(prefix: Sequence[float], bounds: Sequence[int], num_stages: int) -> float:
    """Return a limit below which `_fill` does what it did when it failed with these bounds."""
    end = bounds[-1]
    # Either the first stage did not take the rest, or the one before the last bound not a single layer.
    found = prefix[end] if len(bounds) == num_stages else prefix[end] - prefix[end - 1]
    for left, start, end in zip(range(num_stages - 1, 0, -1), bounds[1:], bounds, strict=False):
        if start > left:  # there was a layer more to take
            found = min(found, prefix[end] - prefix[start - 1])
    return found


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return where stages begin and the last one ends, with as many blocks in each; None where they do not come out even.

    The first layer is an embedding and the last one a head: beside the blocks where these divide, else a block's worth each.

    Source:
        Megatron-LM, core/transformer/transformer_block.py, `get_num_layers_to_build`, and its options
        --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.

    >>> even_cut(10, 4), even_cut(12, 4), even_cut(11, 4)
    ((0, 3, 5, 7, 10), (0, 3, 6, 9, 12), None)
    """
    blocks = num_layers - 2
    if blocks >= num_stages and blocks % num_stages == 0:
        each = blocks // num_stages
        return (0, *(1 + each * stage for stage in range(1, num_stages)), num_layers)
    if num_layers % num_stages == 0:
        each = num_layers // num_stages
        return tuple(each * stage for stage in range(num_stages + 1))
    return None


def share_cut(prefix: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return where stages begin and the last one ends, where each takes layers until its share of all costs is full.

    Args:
        prefix: Sums of the layers' costs: 0, the first, the first two, and so on [any one unit].
        num_stages: Stages, at most the layers [count].

    Source:
        nanotron, src/nanotron/models/base.py, `build_model`.

    >>> share_cut([0, 1, 2, 3, 4, 8], 2), share_cut([0, 1, 2, 9], 3)
    ((0, 4, 5), (0, 1, 2, 3))
    """
    num_layers = len(prefix) - 1
    bounds = [0]
    for stage in range(1, num_stages):
        end = bisect.bisect_right(prefix, prefix[-1] * stage / num_stages * (1 + _MARGIN)) - 1
        bounds.append(min(max(end, bounds[-1] + 1), num_layers - (num_stages - stage)))
    return (*bounds, num_layers)


def own_cut(model: ModelSpec, setup: Setup) -> tuple[int, ...]:
    """Return where stages begin and the last one ends, as this project's runtime cuts the model for a setup.

    Layers of a pipeline are balanced by work, those of one process by parameters and work alike.
    """
    samples = setup.micro_batch_size
    fresh = params_at_first_use(model)
    if setup.schedule == "sequential":
        params = max(1, sum(fresh))
        flops = max(1.0, model.forward_flops)
        costs = [one / params + layer.forward_flops / flops for one, layer in zip(fresh, model.layers, strict=True)]
        _move_to_owners(costs, model)
        return _starts(balance_layers(costs, setup.pp))
    costs = [work_of(layer.forward_flops * samples, one) for one, layer in zip(fresh, model.layers, strict=True)]
    blocks = _bonded(model, under_tp=setup.tp > 1)
    ranks = [rank_of_stage(stage, setup.pp, setup.schedule) for stage in range(setup.pp * setup.virtual)]
    dealt = balance_over_ranks([sum(costs[first:last]) for first, last in blocks], ranks)
    return _starts([stage for stage, (first, last) in zip(dealt, blocks, strict=True) for _ in range(first, last)])


def params_at_first_use(model: ModelSpec) -> list[int]:
    """Return the parameters of each layer that no earlier one has [count]."""
    found = [layer.num_params for layer in model.layers]
    places = {layer.name: place for place, layer in enumerate(model.layers)}
    for shared in model.shared:
        for place in sorted(places[name] for name in shared.layers)[1:]:
            found[place] -= shared.num_params
    return found


def _move_to_owners(costs: list[float], model: ModelSpec) -> None:
    """Add what layers cost to the first one that has a parameter in common with them: it takes them to its device."""
    places = {layer.name: place for place, layer in enumerate(model.layers)}
    for shared in model.shared:
        owner, *others = sorted(places[name] for name in shared.layers)
        for place in others:
            costs[owner] += costs[place]
            costs[place] = 0.0


def _bonded(model: ModelSpec, *, under_tp: bool) -> list[tuple[int, int]]:
    """Return the pieces that a pipeline leaves together, as (first layer, one after the last)."""
    places = {layer.name: place for place, layer in enumerate(model.layers)}
    ends = list(range(1, len(model.layers) + 1))
    for bond in model.bonds:
        if under_tp or bond.when == "always":
            first, last = sorted((places[bond.first], places[bond.last]))
            ends[first] = max(ends[first], last + 1)
    found: list[tuple[int, int]] = []
    for place, end in enumerate(ends):
        if found and place < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((place, end))
    return found


def _starts(stages: Sequence[int]) -> tuple[int, ...]:
    return (*(place for place, stage in enumerate(stages) if place == 0 or stage != stages[place - 1]), len(stages))


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


def least_pipeline_s(
    busy_s: float, *, ranks: int, micro_batches: int, virtual: int, schedule: str, weight_fraction: float, send_s: float
) -> float:
    """Return a time that `pipeline_s` does not go below, but for rounding, however the work is dealt out: even stages [s].

    Args:
        busy_s: What all pp ranks compute for one micro-batch [s].
        ranks: Of the pipeline [count].
        micro_batches: Of the step [count].
        virtual: Stages of a rank [count].
        schedule: Its name.
        weight_fraction: Share of the time that gradients of weights take.
        send_s: A message to the next rank [s].
    """
    total, _ = pipeline_s(
        (busy_s / ranks,) * ranks,
        micro_batches=micro_batches,
        virtual=virtual,
        schedule=schedule,
        weight_fraction=weight_fraction,
        send_s=send_s,
    )
    return total


def waits_s(setup: Setup, virtual: int, send_s: float) -> float:
    """Return what a rank with so many stages waits for messages in each micro-batch [s]."""
    messages = 4 if setup.blocks_on_messages else 2  # one to and one from either neighbour, or these in pairs
    return messages * virtual * send_s * (_ASYNCHRONOUS if setup.overlap else 1.0)


def weight_fraction(setup: Setup) -> float:
    """Return the share of a micro-batch's time that gradients of weights take, which may be put off."""
    return _WEIGHT_FRACTION if setup.trains_weights else 0.0
