"""The `zero_optimization` block of a DeepSpeed configuration, and its activation checkpointing."""

from __future__ import annotations

import math

from meshwright.plan.deepspeed.check import fragment
from meshwright.plan.deepspeed.draft import NOTHING, Draft
from meshwright.plan.deepspeed.keys import KEYS
from meshwright.units import format_bytes

__all__: list[str] = []

_ITEM_BYTES = 4
"""An element of a gradient or a parameter: both keep full precision under bf16, and are fp32 in nearly every model [bytes]."""

# What transformers and accelerate put for "auto", in hidden sizes; DeepSpeed alone drops the key and uses its default.
# Source: transformers `integrations/deepspeed.py` (trainer_config_finalize), read 2026-11.
_AUTO_RULES = {
    "reduce_bucket_size": ("hidden_size^2", lambda hidden: hidden * hidden),
    "stage3_prefetch_bucket_size": ("0.9 x hidden_size^2", lambda hidden: int(0.9 * hidden * hidden)),
    "stage3_param_persistence_threshold": ("10 x hidden_size", lambda hidden: 10 * hidden),
}


def take_zero(draft: Draft) -> None:
    """Put ZeRO stage, shard group, buckets, overlap and offloading into the plan; after the layout."""
    stage = draft.get("zero_optimization.stage") or 0
    if stage > 3:
        draft.problems.add(
            f'"zero_optimization.stage" is {stage} (rule: 0, 1, 2 or 3)', fix=fragment("zero_optimization.stage", 3)
        )
        stage = 3
    draft.plan["zero"] = stage
    if draft.has("zero_optimization.stage"):
        _add_stage_row(draft, stage)
    _take_buckets(draft, stage)
    _take_overlap(draft, stage)
    _take_whole(draft, stage)
    _take_shard(draft, stage)
    _take_offload(draft, stage)


def _add_stage_row(draft: Draft, stage: int) -> None:
    if stage >= 2 and draft.plan["pp"] > 1:
        draft.row(
            "zero_optimization.stage",
            f"zero={stage}",
            f"given; DeepSpeed refuses ZeRO-{stage} with a pipeline (PipelineEngine: stage < 2); this plan runs it",
            warns=True,
        )
    else:
        alone = "; dp=1, so there is nothing to shard" if stage and draft.plan["dp"] == 1 else ""
        draft.row("zero_optimization.stage", f"zero={stage}", draft.source("zero_optimization.stage") + alone)


def _elements(draft: Draft, name: str) -> tuple[int, str]:
    """Return a size in elements, and its source."""
    key = f"zero_optimization.{name}"
    given, hidden = draft.get(key), draft.settings.hidden_size
    if given is not None:
        return given, "given"
    if draft.is_auto(key) and hidden is not None and name in _AUTO_RULES:
        rule, compute = _AUTO_RULES[name]
        return compute(hidden), f"auto: {rule}, hidden_size={hidden} of the model"
    no_hidden = ", since the model names no hidden_size" if draft.is_auto(key) and name in _AUTO_RULES else ""
    return KEYS[key].default, draft.source(key) + no_hidden


def _size(elements: int) -> str:
    return f"{elements:,} elements of {_ITEM_BYTES} bytes = {format_bytes(elements * _ITEM_BYTES)}"


def _take_buckets(draft: Draft, stage: int) -> None:
    if draft.has("zero_optimization.reduce_bucket_size"):
        elements, why = _elements(draft, "reduce_bucket_size")
        if elements < 1:
            draft.problems.add(
                '"zero_optimization.reduce_bucket_size" is 0 (rule: at least 1 element)',
                fix=fragment(
                    "zero_optimization.reduce_bucket_size", KEYS["zero_optimization.reduce_bucket_size"].default
                ),
            )
        sums_in_buckets = stage == 0 or (stage == 2 and draft.plan["pp"] == 1)
        if elements >= 1 and sums_in_buckets:
            draft.plan["bucket_bytes"] = elements * _ITEM_BYTES
        how = {
            0: "the gradient bucket",
            1: "ZeRO-1 here sums all gradients once, at the end of the step; no number changes",
            2: "gradients are summed when so many are there"
            if sums_in_buckets
            else "in a pipeline ZeRO-2 sums all gradients once, at the end of the step; no number changes",
        }.get(stage, "ZeRO-3 here sums gradients layer by layer, with no bucket to size; no number changes")
        set_to = f"bucket_bytes={elements * _ITEM_BYTES}: " if sums_in_buckets else ""
        draft.row("zero_optimization.reduce_bucket_size", f"{set_to}{_size(elements)}", f"{why}; {how}")
    if draft.has("zero_optimization.allgather_bucket_size"):
        elements, why = _elements(draft, "allgather_bucket_size")
        draft.row(
            "zero_optimization.allgather_bucket_size",
            _size(elements),
            f"{why}; shards are gathered layer by layer; no number changes",
        )


def _take_overlap(draft: Draft, stage: int) -> None:
    key, prefetch = "zero_optimization.overlap_comm", "zero_optimization.stage3_prefetch_bucket_size"
    elements, why = _elements(draft, "stage3_prefetch_bucket_size")
    overlap = draft.get(key)
    if overlap is None and (stage > 0 or draft.has(key)):
        overlap = stage == 3
        draft.plan["overlap"] = overlap
        by_stage = "true" if overlap else "false"
        draft.row(
            key,
            _switch(overlap),
            f"{draft.source(key)} for stage {stage}, {by_stage} (its documentation says false for all)",
        )
    elif overlap is not None:
        draft.plan["overlap"] = overlap
        draft.row(key, _switch(overlap), "given")
    if not draft.has(prefetch):
        return
    if stage < 3:
        draft.row(prefetch, NOTHING, f"for stage 3; the stage is {stage}")
        return
    if elements == 0:
        draft.plan["overlap"] = False
        draft.row(prefetch, "overlap=off", f"{why}; nothing is fetched ahead of its use")
        return
    draft.row(
        prefetch,
        _size(elements),
        f"{why}; the next layer is fetched while one computes, whatever its size; no number changes",
    )


def _switch(overlap: bool) -> str:
    return "overlap=on" if overlap else "overlap=off"


def _take_whole(draft: Draft, stage: int) -> None:
    """Read the size below which ZeRO-3 leaves layers whole. DeepSpeed compares parameters, the plan layers, so no more stay
    whole.
    """
    key, limit = (
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_model_persistence_threshold",
    )
    if stage < 3:
        for name in (key, limit):
            if draft.has(name):
                draft.row(name, NOTHING, f"for stage 3; the stage is {stage}")
        return
    total = draft.get(limit)
    if draft.has(key):
        elements, why = _elements(draft, "stage3_param_persistence_threshold")
        draft.plan["whole_below"] = elements * _ITEM_BYTES
        draft.row(
            key,
            f"whole_below={elements * _ITEM_BYTES}: {_size(elements)}",
            f"{why}; layers below it stay whole on every rank",
        )
    if draft.has(limit):
        if total is None or total > 2**53:
            draft.row(limit, NOTHING, f"{draft.source(limit)}; no limit to what stays whole")
        else:
            draft.plan["whole_below"] = 0
            draft.row(
                limit, "whole_below=0", "given; a limit to the sum over layers, which nothing kept whole always meets"
            )


def _take_shard(draft: Draft, stage: int) -> None:
    """Read HSDP: MiCS shards over some neighbours; ZeRO++'s hpZ keeps a second copy of the parameters in each such group."""
    mics, hpz = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"
    size, second = draft.get(mics), draft.get(hpz)
    if size is not None and size < 1:
        size = None
    if second is not None and second <= 1:
        second = None
    dp, shard = draft.plan["dp"], size or second
    key = mics if size else hpz
    if shard is not None and stage == 0:
        draft.problems.add(
            f'"{key}" is {shard} with stage 0 (rule: it says where ZeRO shards)',
            fix=fragment("zero_optimization.stage", 3),
        )
    elif shard is not None and dp % shard:
        draft.problems.add(
            f'"{key}" is {shard} with dp={dp} (rule: it divides dp)', fix=fragment(key, math.gcd(shard, dp))
        )
    elif shard is not None:
        draft.plan["shard"] = shard
    if draft.has(mics):
        draft.row(
            mics,
            f"shard={size}" if size else NOTHING,
            "given; deepspeed 0.19.8 has it no more" if size else "as it is here: off",
        )
    if draft.has(hpz):
        if second:
            draft.row(
                hpz,
                f"shard={second}" if not size else NOTHING,
                "given; the optimizer's state is sharded over the same neighbours, not over dp: more memory, the same numbers",
                warns=True,
            )
        else:
            draft.row(hpz, NOTHING, "as it is here: off")


def _take_offload(draft: Draft, stage: int) -> None:
    optimizer, parameters = "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
    device = draft.get(optimizer) or "none"
    if device not in ("none", "cpu"):
        draft.problems.add(
            f'"{optimizer}" is "{device}", which cannot be honoured: the state can be kept in the host\'s memory, not on a disk',
            fix=fragment(optimizer, "cpu"),
        )
    elif device == "cpu" and stage == 0:
        draft.problems.add(
            f'"{optimizer}" is "cpu" with stage 0 (rule: a rank offloads the state of its shards)',
            fix=fragment("zero_optimization.stage", 1),
        )
    elif device == "cpu":
        draft.plan["offload"] = "optimizer"
    if draft.has(optimizer):
        draft.row(optimizer, "offload=optimizer" if device == "cpu" else "offload=none", draft.source(optimizer))
    device = draft.get(parameters) or "none"
    if device != "none":
        draft.problems.add(
            f'"{parameters}" is "{device}", which cannot be honoured: parameters stay on their device',
            fix=fragment(parameters, "none"),
        )
    if draft.has(parameters):
        draft.row(parameters, NOTHING, "as it is here: parameters stay on their device")


_INTENT = "DeepSpeed ignores this key here, and its meaning is clear"


def take_recompute(draft: Draft) -> None:
    """Put recompute into the plan; after the layout.

    DeepSpeed's `activation_checkpointing` block configures a function that a model may call, and wraps nothing; its switch is
    `pipeline.activation_checkpoint_interval`. The three keys that people write into `pipeline` are read as what they mean.
    """
    intent, interval = "pipeline.activation_checkpointing", "pipeline.activation_checkpoint_interval"
    layers = draft.get(interval) or 0
    recomputes = bool(draft.get(intent)) or layers > 0
    if recomputes:
        draft.plan["recompute"] = "full"
    if draft.has(intent):
        wanted = "full" if draft.get(intent) else "none"
        draft.row(
            intent, f"recompute={wanted}", f"{_INTENT}; its own switch is activation_checkpoint_interval", warns=True
        )
    if draft.has(interval):
        how = (
            "each layer by itself keeps its input, not each group of them; the same numbers"
            if layers > 1
            else draft.source(interval)
        )
        draft.row(interval, "recompute=full" if layers else NOTHING, how)
    for block in ("pipeline", "activation_checkpointing"):
        _take_partitioned(draft, block, recomputes=recomputes)
    _take_block(draft, recomputes=recomputes)


def _take_partitioned(draft: Draft, block: str, *, recomputes: bool) -> None:
    """Read the two keys that stand in either block."""
    ignored = f"{_INTENT}; it belongs to activation_checkpointing; " if block == "pipeline" else ""
    partition, contiguous = f"{block}.partition_activations", f"{block}.contiguous_memory_optimization"
    tp, wanted = draft.plan["tp"], bool(draft.get(f"{block}.partition_activations"))
    if draft.has(partition):
        if wanted and tp > 1:
            draft.plan["sequence_parallel"] = True
            draft.row(
                partition,
                "sequence_parallel=on",
                f"{ignored}saved activations are split over tp={tp}",
                warns=bool(ignored),
            )
        else:
            why = (
                f"it splits saved activations over tensor-parallel ranks, and tp={tp}"
                if wanted
                else "as it is here: off"
            )
            draft.row(partition, NOTHING, f"{ignored}{why}", warns=bool(ignored))
    if draft.has(contiguous):
        on = bool(draft.get(contiguous))
        why = "a hint for the allocator; no number changes" if on else "as it is here: off"
        if on and block == "activation_checkpointing" and not recomputes:
            why = "nothing is recomputed by this block alone"
        draft.row(contiguous, NOTHING, f"{ignored}{why}", warns=bool(ignored))


def _take_block(draft: Draft, *, recomputes: bool) -> None:
    if not draft.has("activation_checkpointing"):
        return
    offload, count = "activation_checkpointing.cpu_checkpointing", "activation_checkpointing.number_checkpoints"
    how = (
        "every layer keeps its input"
        if recomputes
        else "this block wraps nothing, in DeepSpeed neither; pipeline.activation_checkpoint_interval=1 recomputes"
    )
    if draft.get(offload) and recomputes:
        draft.problems.add(
            f'"{offload}" is true, which cannot be honoured: saved activations stay on their device',
            fix=fragment(offload, False),
        )
    for key in (offload, count):
        if draft.has(key):
            draft.row(key, NOTHING, how, warns=bool(draft.get(key)) and not recomputes)
