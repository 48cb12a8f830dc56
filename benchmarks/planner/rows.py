"""Published rows as models, clusters and setups of the planner."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.planner.software import Software, software_of

from meshwright.hardware import ClusterSpec, DeviceSpec, LinkSpec, known_devices, load_cluster
from meshwright.plan.costs.setup import Setup, StateBytes
from meshwright.spec.model import ModelSpec

_DEVICES = {
    "V100-SXM2-16GB": "v100-sxm2-16gb",
    "V100-SXM2-32GB": "v100-sxm2-32gb",
    "V100-SXM3-32GB": "v100-sxm3-32gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "H100-SXM5-80GB": "h100-sxm",
    "H100-96GB-HBM2e-500W": "h100-hbm2e-500w",
    "H200-SXM5-141GB": "h200-sxm",
    "B200": "b200",
    "GB200": "gb200",
    "GB300": "gb300",
    "B300": "b300",
    "MI300X": "mi300x",
}
"""Name in the rows -> device of the table whose efficiency it has."""

_LIKE = {
    "v100-sxm3-32gb": "v100-sxm2-32gb",
    "h100-hbm2e-500w": "h100-sxm",
    "b300": "b200",
    "gb200": "b200",
    "gb300": "b200",
}
"""Device with an efficiency of its own that is not in the table -> the one whose data sheet it shares."""

_SIXTEEN_BITS = ("fp16", "bf16", "fp8", "mxfp8", "nvfp4")

_SCHEDULES = {
    "interleaved_1f1b": "interleaved",
    "1f1b_or_interleaved": "1f1b",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
    "zbv": "zbv",
    "gpipe": "gpipe",
}


def device_name(gpu: str) -> str:
    """Return the table's device for a row's GPU, by its longest common beginning where the name is new."""
    if gpu in _DEVICES:
        return _DEVICES[gpu]
    lowered = gpu.lower()
    best = max(_DEVICES, key=lambda name: _common(name.lower(), lowered))
    return _DEVICES[best] if _common(best.lower(), lowered) >= 4 else next(iter(known_devices()))


def _common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cluster_of(row: dict[str, Any]) -> ClusterSpec:
    """Return the row's cluster: what it prints, and the table's numbers for the rest."""
    hardware = row["hardware"]
    name = device_name(hardware["gpu"])
    preset = load_cluster(_LIKE.get(name, name))
    known, link = preset.device, preset.link
    peak = (hardware.get("peak_bf16_dense_tflops") or 0) * 1e12 or known.peak_flops_per_s.get(
        "bf16", known.peak_flops_per_s.get("fp16", 1e14)
    )
    peaks = {**known.peak_flops_per_s, "bf16": peak, "fp16": peak}
    if "fp8" in known.peak_flops_per_s:
        peaks["fp8"] = 2 * peak
    if hardware["gpu"].startswith(("B", "GB")):
        # Dense NVFP4: four times bf16 on B200 and GB200, six times on B300 and GB300 (NVIDIA's data sheets).
        peaks["fp4"] = (6 if "300" in hardware["gpu"] else 4) * peak
    in_host = int(hardware.get("nvlink_domain") or hardware.get("gpus_per_node") or 8)
    gpus = int(hardware["gpus"])
    in_host = min(in_host, gpus)
    inside = (hardware.get("intra_bw_GBps") or (link.bytes_per_s / 1e9 if link else 32)) * 1e9
    between = (hardware.get("inter_bw_GBps_per_gpu") or _usual_network(hardware["gpu"])) * 1e9
    memory = int((hardware.get("gpu_mem_GB") or known.memory_bytes / 1e9) * 1e9)
    device = DeviceSpec(
        name=name,
        memory_bytes=memory,
        memory_bytes_per_s=_bandwidth(hardware["gpu"]) or known.memory_bytes_per_s,
        peak_flops_per_s=peaks,
    )
    hosts = -(-gpus // in_host)
    return ClusterSpec(
        name=f"{hosts}x{in_host}x{known.name}",
        device=device,
        devices_per_host=in_host,
        num_hosts=hosts,
        link=LinkSpec(name="inside", bytes_per_s=inside),
        network=LinkSpec(name="between", bytes_per_s=between),
    )


def _bandwidth(gpu: str) -> float | None:
    return {"H100-96GB-HBM2e-500W": 2.4e12}.get(gpu)


def _usual_network(gpu: str) -> float:
    # Where a row does not say: what the vendor's own system of that generation has [GB/s per GPU].
    return 50.0 if gpu.startswith(("H", "B", "GB")) else 25.0


@functools.lru_cache(maxsize=4096)
def _model(**sizes: Any) -> ModelSpec:
    return ModelSpec.transformer(**sizes)


def is_recent(row: dict[str, Any]) -> bool:
    """Tell whether a row's software has fused attention: where it does not say, by the GPU."""
    flash = row.get("flash_attention")
    return row["hardware"]["gpu"].startswith(("H", "B", "GB", "MI3")) if flash is None else bool(flash)


def model_of(row: dict[str, Any]) -> ModelSpec:
    """Return the row's model."""
    model = row["model"]
    hidden = model["hidden"]
    gated = bool(model.get("gated_mlp"))
    is_llama = model.get("arch") in ("llama", "mixtral", "qwen", "mistral", "deepseek")
    fused = is_recent(row)
    return _model(
        layers=model["layers"],
        hidden=hidden,
        heads=model["heads"],
        head_size=model.get("head_dim") or max(1, hidden // model["heads"]),
        kv_heads=model.get("kv_heads") or model["heads"],
        intermediate=model.get("ffn_hidden") or 4 * hidden,
        vocab=model.get("vocab") or 50257,
        sequence=model.get("seq") or 2048,
        gated=gated,
        tied=bool(model.get("tied_embeddings")),
        norm="rms" if is_llama else "layer",
        bias=not is_llama,
        learned_positions=not is_llama,
        element_bytes=2 if (row.get("precision") or "bf16") in _SIXTEEN_BITS else 4,
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
    dp = parallel.get("dp") or 1
    micro = batch.get("micro") or max(1, round(batch["global"] / dp / (batch.get("grad_accum") or 1)))
    count = batch.get("grad_accum") or max(1, round(batch["global"] / (micro * dp)))
    precision = row.get("precision") or "bf16"
    virtual = parallel.get("vpp") or 1
    zero = parallel.get("zero_stage")
    recent = is_recent(row)
    software = software_of(row, recent=recent)
    zero = (3 if parallel.get("fsdp") else software.zero) if zero is None else zero
    schedule = parallel.get("schedule") or "1f1b"
    schedule = "interleaved" if virtual > 1 else _SCHEDULES.get(schedule, schedule)
    is_half = precision == "fp16" and not recent
    cp = parallel.get("cp") or 1
    recompute = row.get("recompute") or "none"
    usual = StateBytes(parameter=2.0, gradient=2.0 if is_half else 4.0, optimizer=12.0)
    kind = "bf16" if precision in ("fp8", "mxfp8", "nvfp4") else precision
    return Setup(
        dp=dp,
        tp=parallel.get("tp") or 1,
        pp=parallel.get("pp") or 1,
        cp=cp,
        zero=zero,
        shard=dp * cp if zero else 1,
        virtual=virtual,
        schedule=schedule,
        micro_batches=count,
        micro_batch_size=float(micro),
        sequence_parallel=bool(parallel.get("sp")) and (parallel.get("tp") or 1) > 1,
        recompute=software.selective if recompute == "selective" else recompute,
        dtype=precision,
        element_bytes=2.0 if precision in _SIXTEEN_BITS else 4.0,
        states=software.states.get(kind, usual),
        sent_gradient_bytes=2.0 if is_half or zero == 3 else software.sent_gradient_bytes,
        gathered_bytes=software.gathered_bytes.get(precision, 2.0),
        overlap=recent,
        calls_per_layer=_calls_per_layer(row, software, zero),
        attention_speed=software.attention_speed,
        overlaps_tp=software.overlaps_tp,
        is_eager=not software.fused,
        native_attention=software.native_attention,
        sends_slices=software.sends_slices,
        cut_evenly=software.cuts_evenly,
        blocks_on_messages=software.blocks_on_messages,
        accumulated_bytes=software.accumulated_bytes,
        trains_weights="lora" not in (row.get("task") or "").lower(),
    )
