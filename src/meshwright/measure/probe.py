"""Probe: this machine as a ClusterSpec, measured by ranks as a training would start them."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable
from typing import Any

from meshwright.errors import ConfigError
from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.hardware.efficiency import Efficiency
from meshwright.host import memory_group, usable_cores
from meshwright.measure.probe_ranks import STAGES, measure_rank
from meshwright.ranks.launch import launch

__all__: list[str] = []


def probe_cluster(
    num_devices: int | None = None, *, budget_s: float = 0.4, on_stage: Callable[[str, int, int], None] | None = None
) -> ClusterSpec:
    """Measure this host, and return it as a cluster for `make_plans`.

    Ranks are started as a training starts them, and measure at the same time: the rate of products in fp32 and bf16, the
    bandwidth of memory, the time of one small operator, attention, AdamW, and all-reduces of four sizes.

    Args:
        num_devices: Ranks, one for each device; None means the visible GPUs, or one for each core [count].
        budget_s: How long each measurement is repeated [s].
        on_stage: Called in this process as ``on_stage(name, index, count)`` when a measurement begins.

    Returns:
        The cluster. Its ``sources`` have the date and the spread of each number: the distance of the quartiles over the median.

    Raises:
        ConfigError: An argument is out of range, or this process is itself a rank.
    """
    if num_devices is None:
        num_devices = _visible_devices()
    if num_devices < 1:
        raise ConfigError(f"num_devices={num_devices} (rule: it is at least 1)", fix="num_devices=1")
    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s} (rule: it is above 0)", fix="budget_s=0.4")

    def tell(rank: int, event: dict[str, Any]) -> None:
        if on_stage is not None and rank == 0 and "probe" in event:
            on_stage(event["probe"], STAGES.index(event["probe"]), len(STAGES))

    return _cluster_of(launch(measure_rank, num_devices, budget_s, on_event=tell))


def _visible_devices() -> int:
    import torch

    return torch.cuda.device_count() or usable_cores()


def _cluster_of(ranks: list[dict[str, Any]]) -> ClusterSpec:
    count = len(ranks)
    facts = ranks[0]["device"]

    def median(name: str) -> float:
        return statistics.median(rank[name][0] for rank in ranks if name in rank)

    today = datetime.datetime.now(tz=datetime.UTC).date()

    def source(name: str) -> str:
        spread = max(rank[name][1] for rank in ranks if name in rank)
        return f"measured {today} on {count} ranks at once, spread {spread:.0%}"

    peaks = {dtype: median(f"product_{dtype}") for dtype in ("fp32", "bf16")}
    alone = ranks[0]["product_alone"][0] / peaks["fp32"]
    device = DeviceSpec(
        name=facts["name"],
        memory_bytes=facts["memory_bytes"] or _host_memory_bytes() // count,
        memory_bytes_per_s=median("memory"),
        peak_flops_per_s=peaks,
        sources={
            "memory_bytes_per_s": source("memory"),
            "peak_flops_per_s.fp32": f"{source('product_fp32')}; one rank alone {alone:.2f} times that",
            "peak_flops_per_s.bf16": source("product_bf16"),
        },
    )
    is_cpu = facts["type"] == "cpu"
    link = _link_of(ranks, source) if count > 1 else None
    return ClusterSpec(
        name=f"this-host-{count}x{facts['name']}",
        device=device,
        devices_per_host=count,
        link=link,
        efficiency=Efficiency(
            num_units=facts["num_units"],
            matmul=dict.fromkeys(peaks, 1.0),
            memory=1.0,
            attention_forward=min(1.0, median("attention_forward") / peaks["fp32" if is_cpu else "bf16"]),
            attention_backward=min(1.0, median("attention_backward") / peaks["fp32" if is_cpu else "bf16"]),
            inner_overhead=0.0,
            elementwise_passes=1.0,
            kernel_s=0.0 if is_cpu else 5e-6,
            operator_s=median("operator"),
            collective_host_s=link.latency_s or 0.0 if link else 0.0,
            link=1.0,
            network=1.0,
            rails=1.0,
            link_latency_s=link.latency_s or 0.0 if link else 0.0,
            network_latency_s=0.0,
            hop_s=0.0,
            tp_overlap=0.0,
            # A core that sends does not compute: nothing hides, and nothing is slowed down.
            interference=0.0 if is_cpu else 0.1,
            overlap=0.0 if is_cpu else 1.0,
            optimizer_bytes=median("optimizer") * median("memory"),
            step_s=median("step"),
        ),
    )


def _link_of(ranks: list[dict[str, Any]], source: Callable[[str], str]) -> LinkSpec:
    """Return latency and bandwidth of all-reduces: the time of the smallest, and what the largest adds for its bytes."""
    sizes = sorted(int(name.removeprefix("all_reduce_")) for name in ranks[0] if name.startswith("all_reduce_"))
    small, large = f"all_reduce_{sizes[0]}", f"all_reduce_{sizes[-1]}"
    latency = statistics.median(rank[small][0] for rank in ranks)
    seconds = statistics.median(rank[large][0] for rank in ranks)
    sent = 2 * (len(ranks) - 1) / len(ranks) * (sizes[-1] - sizes[0])
    return LinkSpec(
        name="between-ranks",
        bytes_per_s=sent / max(seconds - latency, 0.1 * seconds),
        latency_s=latency,
        sources={"bytes_per_s": source(large), "latency_s": source(small)},
    )


def _host_memory_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    group = memory_group()
    return min(total, group.limit_bytes) if group is not None and group.limit_bytes else total
