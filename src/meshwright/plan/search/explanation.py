"""Reasons for a plan, in words: what takes its time and memory, and what would have to change for a faster one."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.plan.search.candidate import Candidate, plan_of
from meshwright.plan.search.space import Task
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []


def reasons_for(
    candidate: Candidate, task: Task, *, best: Candidate, faster_misses: Sequence[Candidate], limit_bytes: float
) -> tuple[str, ...]:
    """Return sentences on a plan.

    Args:
        candidate: The plan.
        task: What is planned for.
        best: The fastest plan that fits.
        faster_misses: Plans that would be faster if they fitted, those that lack the least memory first.
        limit_bytes: What a device's memory may hold [bytes].
    """
    found = [_time(candidate), _memory(candidate, limit_bytes), *_strategies(candidate, task), *_mixed(task)]
    found += _halved(task)
    if candidate is not best:
        slower, other = candidate.cost.step_s / best.cost.step_s - 1, plan_of(best, task.train)
        found.append(
            f"{slower:.1%} slower than '{other}'"
            if slower >= 0
            else f"{-slower:.1%} faster than '{other}', which is simpler: so near, that is preferred"
        )
    elif faster_misses:
        miss = faster_misses[0]
        more = miss.cost.memory.peak - limit_bytes
        gain = best.cost.step_s / miss.cost.step_s - 1
        found.append(f"with {format_bytes(more)} more per device: '{plan_of(miss, task.train)}', {gain:.0%} faster")
    return tuple(found)


def _mixed(task: Task) -> list[str]:
    cluster = task.cluster
    if not cluster.made_of:
        return []
    return [
        f"all {cluster.num_devices} devices are taken for the slowest kind of {', '.join(cluster.made_of)}, with the least "
        f"memory ({format_bytes(cluster.device.memory_bytes)}): ranks of a step wait for the slowest"
    ]


def _halved(task: Task) -> list[str]:
    """Say that a module's numbers in bf16 are guessed: sizes alone have no dtypes, and no casts to leave out."""
    is_seen = any(operator.dtype == "fp32" for layer in task.model.layers for operator in layer.operators)
    if task.train.precision != "bf16" or task.model.autocast != "none" or not is_seen:
        return []
    return [
        "described without autocast: bf16 is taken for half of fp32's bytes, and casts are not counted; "
        'describe_model(..., autocast="cuda") counts them'
    ]


def _time(candidate: Candidate) -> str:
    cost = candidate.cost
    parts = {
        "forward": cost.forward_s,
        "backward": cost.backward_s,
        "recompute": cost.recompute_s,
        "bubble": cost.bubble_s,
        "communication that nothing hides": cost.exposed_comm_s,
        "optimizer": cost.optimizer_s,
    }
    shares = ", ".join(
        f"{name} {part / cost.step_s:.0%}" for name, part in parts.items() if part >= 0.005 * cost.step_s
    )
    return f"{format_seconds(cost.step_s)} a step: {shares}"


def _memory(candidate: Candidate, limit_bytes: float) -> str:
    memory = candidate.cost.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "buffers": memory.buffers,
    }
    shares = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part >= 0.005 * memory.peak)
    return f"{format_bytes(memory.peak)} of {format_bytes(limit_bytes)} a device: {shares}"


def _strategies(candidate: Candidate, task: Task) -> list[str]:
    degrees, choice = candidate.degrees, candidate.choice
    found: list[str] = []
    if degrees.tp > 1:
        found.append(f"tp={degrees.tp} divides each layer's weights and activations inside a host")
    if degrees.pp > 1:
        held = f", {choice.virtual} stages each" if choice.virtual > 1 else ""
        found.append(f"pp={degrees.pp} divides {len(task.model.layers)} layers over ranks{held}")
    if choice.zero:
        what = ("optimizer", "optimizer and gradients", "optimizer, gradients and parameters")[choice.zero - 1]
        found.append(f"zero={choice.zero} shards {what} over {choice.shard or degrees.dp} ranks")
    if choice.recompute != "none":
        found.append(
            f"recompute={choice.recompute} trades {format_seconds(candidate.cost.recompute_s)} for activations"
        )
    if choice.offload != "none":
        found.append("the optimizer's state lies in the hosts' memory")
    return found
