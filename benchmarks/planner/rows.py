"""Published rows as models, clusters and setups of the planner; each function takes a row as `fields.cleaned` returns it."""

from __future__ import annotations

import functools
import re
from typing import Any

from benchmarks.planner.gpus import gpu_of, half_peak
from benchmarks.planner.software import Software, software_of

from meshwright.hardware import ClusterSpec, DeviceSpec, LinkSpec, load_cluster
from meshwright.plan.costs.setup import Setup, StateBytes
from meshwright.spec.model import ModelSpec

_HAS_FP4 = ("b200", "gb200", "b300", "gb300", "mi355x")

_SIXTEEN_BITS = ("fp16", "bf16", "fp8", "mxfp8", "nvfp4")

_SCHEDULES = {
    "1f1b": "1f1b",
    "1f1b_or_interleaved": "1f1b",
    "interleaved": "interleaved",
    "interleaved_1f1b": "interleaved",
    "zb-1p": "zb-h1",
    "zb-h1": "zb-h1",
    "zb-2p": "zb-h2",
    "zb-h2": "zb-h2",
    "zbv": "zbv",
    "dualpipe": "zbv",
    "gpipe": "gpipe",
    "afab": "gpipe",
}
"""Word for a schedule -> the planner's; others are taken for 1F1B."""

_LLAMAS = ("llama", "mixtral", "qwen", "mistral", "deepseek", "internlm", "gemma", "yi", "olmo")
"""Beginnings of architectures with RMS norms, rotary embeddings and gates, and no biases: all of 2023 or later."""

_TWO_WAYS = ("bert", "roberta", "vit", "t5")
"""Beginnings of architectures without a causal mask."""

_ON_OMNI_PATH = re.compile(r"\b(omni-path|opa|jean zay)\b")

_OMNI_PATH = 0.5
"""What NCCL reaches on Omni-Path over what it is expected to on InfiniBand: 40.5 of a port's 100 Gb/s over 0.8. Source:
bigscience-workshop/bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt, on Jean Zay: 4 hosts of 8 A100, one port."""


def cluster_of(row: dict[str, Any]) -> ClusterSpec:
    """Return the row's cluster: what it prints, and the tables' numbers for the rest."""
    hardware = row["hardware"]
    gpu = gpu_of(hardware["gpu"], hardware.get("peak_bf16_dense_tflops"))
    preset = load_cluster(gpu.like)
    known, link = preset.device, preset.link
    peak = (hardware.get("peak_bf16_dense_tflops") or gpu.peak_tflops or half_peak(known) / 1e12) * 1e12
    peaks = {**known.peak_flops_per_s, "bf16": peak, "fp16": peak}
    if "fp8" in known.peak_flops_per_s:
        peaks["fp8"] = 2 * peak
    if gpu.device in _HAS_FP4:
        # Dense fp4: four times bf16 on B200, GB200 and MI355X, six times on B300 and GB300 (data sheets).
        peaks["fp4"] = (6 if "300" in gpu.device else 4) * peak
    gpus = hardware["gpus"]
    in_host = min(hardware.get("nvlink_domain") or hardware.get("gpus_per_node") or 8, gpus)
    inside = hardware.get("intra_bw_GBps") or gpu.link_gb_per_s or (link.bytes_per_s / 1e9 if link else 32)
    between = hardware.get("inter_bw_GBps_per_gpu") or _usual_network(gpu.device)
    if _ON_OMNI_PATH.search(str(hardware.get("notes") or "").lower()):
        between *= _OMNI_PATH
    device = DeviceSpec(
        name=gpu.device,
        memory_bytes=int((hardware.get("gpu_mem_GB") or gpu.memory_gb or known.memory_bytes / 1e9) * 1e9),
        memory_bytes_per_s=gpu.memory_gb_per_s * 1e9 if gpu.memory_gb_per_s else known.memory_bytes_per_s,
        peak_flops_per_s=peaks,
    )
    hosts = -(-gpus // in_host)
    return ClusterSpec(
        name=f"{hosts}x{in_host}x{known.name}",
        device=device,
        devices_per_host=in_host,
        num_hosts=hosts,
        link=LinkSpec(name="inside", bytes_per_s=inside * 1e9),
        network=LinkSpec(name="between", bytes_per_s=between * 1e9),
    )


def _usual_network(device: str) -> float:
    # Where a row does not say: what the vendor's own system of that generation has [GB/s per GPU].
    return 50.0 if device.startswith(("h", "b", "gb", "mi3")) else 25.0


@functools.lru_cache(maxsize=256)
def _model(**sizes: Any) -> ModelSpec:
    return ModelSpec.transformer(**sizes)


def is_recent(row: dict[str, Any]) -> bool:
    """Tell whether a row's software has fused attention: where it does not say, by the GPU."""
    flash = row.get("flash_attention")
    if flash is not None:
        return flash
    if row["model"]["arch"].startswith(_LLAMAS):
        return True
    device = gpu_of(row["hardware"]["gpu"], row["hardware"].get("peak_bf16_dense_tflops")).device
    return not device.startswith(("v100", "a100"))


def model_of(row: dict[str, Any]) -> ModelSpec:
    """Return the row's model."""
    model = row["model"]
    hidden = model["hidden"]
    is_llama = model["arch"].startswith(_LLAMAS)
    gated = is_llama if model.get("gated_mlp") is None else model["gated_mlp"]
    fused = is_recent(row)
    return _model(
        layers=model["layers"],
        hidden=hidden,
        heads=model["heads"],
        head_size=model.get("head_dim") or max(1, hidden // model["heads"]),
        kv_heads=model.get("kv_heads") or model["heads"],
        intermediate=model.get("ffn_hidden") or (8 * hidden // 3 if gated else 4 * hidden),
        vocab=model.get("vocab") or 50257,
        sequence=model["seq"],
        causal=not model["arch"].startswith(_TWO_WAYS),
        gated=gated,
        tied=bool(model.get("tied_embeddings")),
        norm="rms" if is_llama else "layer",
        bias=not is_llama,
        learned_positions=not is_llama,
        element_bytes=2 if row["precision"] in _SIXTEEN_BITS else 4,
        fused_attention=fused,
        dropout=not fused,
        experts=model.get("experts") or 1,
        experts_per_token=model.get("experts_per_token") or 1,
    )


def _calls_per_layer(row: dict[str, Any], software: Software, zero: int) -> float:
    """Return the collectives in which data parallelism exchanges a layer: at most what the software's buckets make of it."""
    parallel = row["parallel"]
    if not software.bucket_params or zero >= 3:
        return software.calls_per_layer
    model = model_of(row)
    degree = (parallel.get("tp") or 1) * (parallel.get("pp") or 1)
    smallest, each = software.bucket_params
    bucket = max(smallest, each * (parallel.get("dp") or 1) * (parallel.get("cp") or 1))
    layers = max(1.0, len(model.layers) / (parallel.get("pp") or 1))
    return min(1.0, max(1.0, model.num_params / degree / bucket) / layers)


def setup_of(row: dict[str, Any]) -> Setup:
    """Return the row's degrees, batch and numerics.

    A row does not say what its software overlaps. Fused attention came into these code bases together with overlapped
    gradients: a row that has it is taken for software of 2023 or later, which overlaps.
    """
    parallel, batch = row["parallel"], row["batch"]
    dp, micro = parallel["dp"], batch["micro"]
    count = max(1, round(batch["global"] / (micro * dp)))
    precision = row["precision"]
    virtual = parallel.get("vpp") or 1
    zero = parallel.get("zero_stage")
    recent = is_recent(row)
    software = software_of(row, recent=recent)
    zero = (3 if parallel.get("fsdp") else software.zero) if zero is None else zero
    schedule = "interleaved" if virtual > 1 else _SCHEDULES.get(str(parallel.get("schedule")).lower(), "1f1b")
    is_half = precision == "fp16" and not recent
    cp = parallel.get("cp") or 1
    recompute = row.get("recompute") or "none"
    tp, size = parallel.get("tp") or 1, 2.0 if precision in _SIXTEEN_BITS else 4.0
    # Tools of 2023 and later run norms on slices of the sequence wherever there is tensor parallelism.
    slices = recent if parallel.get("sp") is None else parallel["sp"]
    usual = StateBytes(parameter=2.0, gradient=2.0 if is_half else 4.0, optimizer=12.0)
    if size == 4:
        usual = StateBytes(parameter=4.0, gradient=4.0, optimizer=8.0)
    kind = "bf16" if precision in ("fp8", "mxfp8", "nvfp4") else precision
    return Setup(
        dp=dp,
        tp=tp,
        pp=parallel.get("pp") or 1,
        cp=cp,
        zero=zero,
        shard=min(dp, parallel.get("fsdp_size") or dp) * cp if zero else 1,
        virtual=virtual,
        schedule=schedule,
        micro_batches=count,
        micro_batch_size=float(micro),
        sequence_parallel=slices and tp > 1,
        recompute=software.selective if recompute == "selective" else recompute,
        dtype=precision,
        element_bytes=size,
        states=software.states.get(kind, usual),
        sent_gradient_bytes=2.0 if is_half or zero == 3 else software.sent_gradient_bytes,
        gathered_bytes=software.gathered_bytes.get(precision, size),
        overlap=recent,
        calls_per_layer=_calls_per_layer(row, software, zero),
        attention_speed=software.attention_speed,
        kv_share=min(1.0, (row["model"].get("kv_heads") or row["model"]["heads"]) / row["model"]["heads"]),
        gathers_low=software.gathers_low,
        tp_operators=software.tp_operators,
        overlaps_tp=software.overlaps_tp,
        is_eager=not software.fused,
        native_attention=software.native_attention,
        sends_slices=software.sends_slices,
        cut_evenly=software.cuts_evenly,
        cut_by_shares=software.cuts_by_shares,
        blocks_on_messages=software.blocks_on_messages,
        waits_for_device=row["hardware"]["gpus"] >= software.waits_for_device_from,
        accumulated_bytes=software.accumulated_bytes,
        loss_traffic=software.loss_traffic,
        loss_kept=software.loss_kept,
        keeps_gathered=software.keeps_gathered,
        keeps_head=True,
        copies_per_rank=software.copies_per_rank,
        trains_weights="lora" not in row["task"].lower(),
        offloads_optimizer=bool(parallel.get("cpu_offload")),
    )
