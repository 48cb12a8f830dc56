"""Degrees of parallelism from a DeepSpeed configuration: tensor, sequence and pipeline, and the rest for data parallelism."""

from __future__ import annotations

import math

from meshwright.plan.deepspeed.batch import Batch, read_batch, take_batch
from meshwright.plan.deepspeed.check import AUTO, fragment
from meshwright.plan.deepspeed.draft import NOTHING, Draft, Row

__all__: list[str] = []

_SHORT_PIPELINES = (2, 3)
"""Stages that are tried where a file wants a pipeline and does not say of how many: the fewest have the smallest bubble."""


def take_layout(draft: Draft, *, num_devices: int | None, available: int, devices_from: str) -> None:
    """Put the degrees and the batch into the plan.

    Args:
        draft: The configuration.
        num_devices: The devices that must be used; None leaves it to the file, up to `available` where it does not say [count].
        available: The devices that there are [count].
        devices_from: Source of that number, for the table.
    """
    tp, cp = _tensor_degree(draft), draft.get("sequence_parallel_size") or 1
    batch = read_batch(draft)
    stages = _given_stages(draft)
    wants_pipeline = draft.has("pipeline")
    if num_devices is not None:
        rest = _divide(draft, num_devices, tp * cp, stages or 1, f"tp x cp x pp = {tp} x {cp} x {stages or 1}")
        if stages is None and wants_pipeline:
            pp, why = _choose_stages(rest, batch)
        else:
            pp, why = stages or 1, "given"
        dp = rest if stages else max(1, rest // pp)
        source = devices_from
    else:
        dp, pp, why = _spread(batch, stages, max(1, available // (tp * cp)), wants_pipeline=wants_pipeline)
        source = "the batch says how many data-parallel ranks" if batch.dp == dp else devices_from
    _add_rows(draft, pp=pp, tp=tp, cp=cp, why_stages=why)
    degrees = " x ".join(
        f"{axis} {degree}" for axis, degree in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)) if degree > 1
    )
    given = str(num_devices) if num_devices is not None else NOTHING
    total = pp * dp * cp * tp
    draft.rows.append(Row(key="devices", given=given, resolved=f"{total} = {degrees}" if degrees else "1", why=source))
    draft.plan |= {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    take_batch(draft, batch, dp)


def _divide(draft: Draft, num_devices: int, inner: int, stages: int, product: str) -> int:
    """Return the devices that the degrees leave, and record a problem if they do not divide."""
    used = inner * stages
    if num_devices % used:
        better = math.ceil(num_devices / used) * used
        draft.problems.add(
            f"{product} = {used} does not divide {num_devices} devices (rule: the degrees multiply to the devices)",
            fix=f"--devices {better}",
        )
    return max(1, num_devices // used)


def _tensor_degree(draft: Draft) -> int:
    size, inner = draft.get("tensor_parallel.autotp_size"), draft.get("tensor_parallel.tp.tp_size")
    if size and inner and inner > 1 and size != inner:
        draft.problems.add(
            f'"tensor_parallel.autotp_size" is {size} and "tensor_parallel.tp.tp_size" is {inner} (rule: they are equal)',
            fix=fragment("tensor_parallel.tp.tp_size", size),
        )
    return max(1, size or inner or 1)


def _given_stages(draft: Draft) -> int | None:
    """Return the number of stages, or None where the file leaves it open."""
    stages = draft.get("pipeline.stages")
    if stages is None or stages == AUTO:
        return None
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        draft.problems.add(
            f'"pipeline.stages" is {stages!r} (rule: a whole number, at least 1, or "auto")',
            fix=fragment("pipeline.stages", AUTO),
        )
        return 1
    return stages


def _choose_stages(rest: int, batch: Batch) -> tuple[int, str]:
    """Return the number of stages for a pipeline over this many devices, and the reason."""
    if batch.dp is not None and rest % batch.dp == 0:
        pp = rest // batch.dp
        return (
            pp,
            f"the batch says dp={batch.dp} (train / (micro x accumulation)), which leaves {pp} of {rest} devices for stages",
        )
    if rest == 1:
        return 1, "one device has no second stage; --devices says how many there are"
    fitting = [pp for pp in _SHORT_PIPELINES if rest % pp == 0]
    for pp in [pp for pp in fitting if batch.fits(rest // pp)] or fitting:
        micro_batches = batch.complete(rest // pp).accumulation if batch.fits(rest // pp) else None
        bubble = f", a bubble of {(pp - 1) / (micro_batches + pp - 1):.0%} of the step" if micro_batches else ""
        return (
            pp,
            f"a pipeline is asked for, and {pp} stages are the shortest that divide {rest} devices{bubble}; the rest is dp",
        )
    return 1, f"{rest} devices divide into neither 2 nor 3 stages; pipeline.stages says otherwise"


def _spread(batch: Batch, stages: int | None, available: int, *, wants_pipeline: bool) -> tuple[int, int, str]:
    """Return (dp, pp, reason for the stages) where the number of devices is not given."""
    if batch.dp is not None:
        rest = max(1, available // batch.dp)
        if stages is None and wants_pipeline:
            pp = next((pp for pp in _SHORT_PIPELINES if pp <= rest), 1)
            return (
                batch.dp,
                pp,
                f"the batch says dp={batch.dp}, which leaves {rest} of {available} devices for each rank's stages",
            )
        return batch.dp, stages or 1, "given"
    if stages is None and wants_pipeline:
        pp, why = _choose_stages(available, batch)
    else:
        pp, why = stages or 1, "given"
    most = max(1, available // pp)
    return next((dp for dp in range(most, 0, -1) if batch.fits(dp)), most), pp, why


def _add_rows(draft: Draft, *, pp: int, tp: int, cp: int, why_stages: str) -> None:
    for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if draft.has(key):
            draft.row(key, f"tp={tp}", f"{draft.source(key)}; which layers are cut is found in the model, and proven")
    if draft.has("sequence_parallel_size"):
        draft.row("sequence_parallel_size", f"cp={cp}", "given: sequences are split over a context-parallel axis")
    if draft.has("pipeline"):
        word = "given" if draft.get("pipeline.stages") is not None else draft.source("pipeline.stages").split(":")[0]
        draft.row("pipeline.stages", f"pp={pp}", why_stages if word == "given" else f"{word}: {why_stages}")
    if draft.has("pipeline.partition"):
        _take_partition(draft)


def _take_partition(draft: Draft) -> None:
    partition = draft.get("pipeline.partition") or "best"
    if partition.lower() not in ("best", "parameters"):
        draft.problems.add(
            f'"pipeline.partition" is "{partition}", which cannot be honoured: stages are balanced by what their layers cost',
            fix=fragment("pipeline.partition", "best"),
        )
    draft.row("pipeline.partition", NOTHING, "no number changes: stages are balanced by what their layers cost")
