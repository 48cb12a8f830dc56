"""Probe: this machine as a ClusterSpec, measured by ranks as a training would start them."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from meshwright.errors import ConfigError, StoppedOnRequest
from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.hardware.efficiency import ELEMENTWISE_BACKWARD, Efficiency, share_at
from meshwright.hardware.exchanges import EXCHANGES
from meshwright.host import host_memory_bytes, usable_cores
from meshwright.measure.host_pace import copy_rate
from meshwright.measure.probe_cores import CoreUse, share_of_others
from meshwright.measure.probe_sizes import BUDGET_S, COLLECTIVE_BYTES, LARGE, VISITS, attention_rates, exchange_name
from meshwright.ranks.launch import QUICK_STOP_S, launch

__all__: list[str] = []


def probe_cluster(
    num_devices: int | None = None,
    *,
    threads_per_device: int | None = None,
    budget_s: float = BUDGET_S,
    on_stage: Callable[[str, int, int], None] | None = None,
) -> ClusterSpec:
    """Measure this host, and return it as a cluster for `make_plans`.

    Ranks are started as a training starts them, and measure at the same time: a process's memory, the rate of products in fp32
    and bf16 and by size, memory's bandwidth by size, small operators, attention, an LSTM, AdamW, and exchanges: all-reduce,
    all-gather, reduce-scatter and a message, of four sizes, among 2, 4, ... and all ranks.

    Args:
        num_devices: Ranks, one for each device; None means the visible GPUs, or one for each core [count].
        threads_per_device: Threads that a CPU rank computes with; None means an equal share of the cores [count].
        budget_s: How long each measurement is repeated [s].
        on_stage: Called in this process as ``on_stage(name, index, count)`` when a measurement begins.

    Returns:
        The cluster. Its ``sources`` have the date and the spread of each number: the distance of the quartiles over the median.

    Raises:
        ConfigError: An argument is out of range, or this process is itself a rank.
        StoppedOnRequest: A signal asked for it.
    """
    if num_devices is None:
        num_devices = _visible_devices()
    if num_devices < 1:
        raise ConfigError(f"num_devices={num_devices} (rule: it is at least 1)", fix="num_devices=1")
    if threads_per_device is not None and threads_per_device < 1:
        raise ConfigError(
            f"threads_per_device={threads_per_device} (rule: it is at least 1)", fix="threads_per_device=1"
        )
    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s} (rule: it is above 0)", fix=f"budget_s={BUDGET_S}")

    def tell(rank: int, event: dict[str, Any]) -> None:
        if on_stage is not None and rank == 0 and "probe" in event:
            on_stage(event["probe"], event["place"], len(VISITS))

    copied = copy_rate()
    try:
        ranks = launch(
            *(measure_on_rank, num_devices, budget_s),
            threads_per_rank=threads_per_device,
            on_event=tell,
            stop_grace_s=QUICK_STOP_S,
        )
    except StoppedOnRequest as error:
        raise StoppedOnRequest("the measurement of this machine was stopped; nothing of it is kept") from error
    return dataclasses.replace(_cluster_of(ranks), copied_bytes_per_s=copied)


def measure_on_rank(budget_s: float) -> dict[str, Any]:
    """Measure on this rank, which a launch has started; see `probe_ranks`."""
    from meshwright.measure.probe_ranks import measure_rank

    return measure_rank(budget_s)


def _visible_devices() -> int:
    import torch

    return torch.cuda.device_count() or usable_cores()


def _cluster_of(ranks: list[dict[str, Any]]) -> ClusterSpec:
    count = len(ranks)
    facts = ranks[0]["device"]
    sizes = LARGE[facts["type"]]

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
        memory_bytes=facts["memory_bytes"] or host_memory_bytes() // count,
        memory_bytes_per_s=median("memory"),
        peak_flops_per_s=peaks,
        sources={
            "memory_bytes_per_s": source("memory"),
            "peak_flops_per_s.fp32": f"{source('product_fp32')}; one rank alone {alone:.2f} times that",
            "peak_flops_per_s.bf16": source("product_bf16"),
        },
    )
    is_cpu = facts["type"] == "cpu"
    attention = {
        name: [
            statistics.median(numbers)
            for numbers in zip(*(attention_rates(one, name, sizes) for one in ranks), strict=True)
        ]
        for name in ("forward", "backward")
    }
    link, runtime = _link_of(ranks, source) if count > 1 else None, _runtime_of(ranks)
    cluster = ClusterSpec(
        name=f"this-host-{count}x{facts['name']}",
        device=device,
        devices_per_host=count,
        link=link,
        turn_s=statistics.median(rank["turn_s"] for rank in ranks),
        taken_by_others=share_of_others([CoreUse(**rank["cores"]) for rank in ranks]),
        efficiency=Efficiency(
            num_units=facts["num_units"],
            matmul=dict.fromkeys(peaks, 1.0),
            memory=1.0,
            attention_forward=min(1.0, attention["forward"][0] / peaks["fp32" if is_cpu else "bf16"]),
            attention_backward=min(1.0, attention["backward"][0] / peaks["fp32" if is_cpu else "bf16"]),
            score_forward_s=attention["forward"][1],
            score_backward_s=attention["backward"][1],
            inner_overhead=0.0,
            elementwise_passes=1.0,
            issues_ahead=not is_cpu,
            product_curve=_curve(
                "product_of_", ranks, peaks["fp32"], (2.0 * math.prod(sizes.product),) if is_cpu else ()
            ),
            convolution=tuple(sorted(_pairs_of(ranks, "convolution_of_").values())),
            traffic_curve=_curve("traffic_of_", ranks, median("memory")),
            run_s=median("run") if is_cpu else 0.0,
            far_traffic=_far("far_traffic_", ranks),
            far_product=_far("far_product_", ranks),
            recurrence_forward=median("recurrence_forward") / peaks["fp32"] if is_cpu else 1.0,
            recurrence_backward=median("recurrence_backward") / peaks["fp32"] if is_cpu else 1.0,
            held=median("held"),
            process_bytes=max(rank["process_bytes"][0] for rank in ranks),
            kernel_s=0.0 if is_cpu else 5e-6,
            operator_s=(median("operator") + median("operator_backward")) / 2,
            # Where it was measured, the runtime's own time by exchange has it.
            collective_host_s=link.latency_s or 0.0 if link and "tensor" not in runtime else 0.0,
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
            tensor_s=median("tensor"),
            skew=median("skew") if is_cpu and count > 1 else 0.0,
            runtime=runtime,
            host=_pairs_of(ranks, "host_") if is_cpu else {},
            exchanges=_exchanges_of(ranks),
        ),
    )
    return _with_functions(cluster, ranks)


def _with_functions(cluster: ClusterSpec, ranks: list[dict[str, Any]]) -> ClusterSpec:
    """Return the cluster with the times of elementwise functions over those of sums that move as many bytes."""
    efficiency = cluster.efficiency
    names = [name for name in ranks[0] if name.startswith("function_")]
    if efficiency is None or not names:
        return cluster
    bandwidth = cluster.device.memory_bytes_per_s or math.inf

    def plain_s(num_bytes: float) -> float:
        return num_bytes / (bandwidth * share_at(num_bytes, efficiency.traffic_curve))

    found: dict[str, tuple[float, ...]] = {}
    for name in names:
        forward, backward, num_bytes = (
            statistics.median(numbers) for numbers in zip(*(rank[name][0] for rank in ranks), strict=True)
        )
        ratios = forward / plain_s(num_bytes), backward / plain_s(ELEMENTWISE_BACKWARD * num_bytes)
        found[name.removeprefix("function_")] = ratios
    return dataclasses.replace(cluster, efficiency=dataclasses.replace(efficiency, functions=found))


def _runtime_of(ranks: list[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return what the runtime adds; of tensor parallelism's exchanges, what they take beside themselves."""
    found = _pairs_of(ranks, "runtime_")
    if "tensor" in found:
        names = [exchange_name(kind, len(ranks), min(COLLECTIVE_BYTES)) for kind in ("all_gather", "reduce_scatter")]
        own = statistics.fmean(statistics.median(rank[name][0] for rank in ranks) for name in names)
        fixed, each = found["tensor"]
        found["tensor"] = (fixed, max(0.0, each - own))
    return found


def _pairs_of(ranks: list[dict[str, Any]], prefix: str) -> dict[str, tuple[float, ...]]:
    """Return what ranks measured under names that begin so: kind -> two times [s]."""
    names = [name for name in ranks[0] if name.startswith(prefix)]
    return {
        name.removeprefix(prefix): tuple(
            statistics.median(numbers) for numbers in zip(*(rank[name][0] for rank in ranks), strict=True)
        )
        for name in names
    }


def _exchanges_of(ranks: list[dict[str, Any]]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Return rows of (ranks, bytes, seconds) for each kind of exchange."""
    found: dict[str, tuple[tuple[float, ...], ...]] = {}
    for kind in EXCHANGES:
        places = itertools.product(range(2, len(ranks) + 1), sorted(COLLECTIVE_BYTES))
        named = [(count, size, exchange_name(kind, count, size)) for count, size in places]
        times = [(count, size, [rank[name][0] for rank in ranks if name in rank]) for count, size, name in named]
        rows = tuple(
            (float(count), float(size), statistics.median(seconds)) for count, size, seconds in times if seconds
        )
        found |= {kind: rows} if rows else {}
    return found


def _curve(
    prefix: str, ranks: list[dict[str, Any]], whole: float, at_whole: tuple[float, ...] = ()
) -> tuple[tuple[float, ...], ...]:
    """Return a rate by size as shares of the one that large sizes reach, which holds from ``at_whole`` on."""
    sizes = sorted(int(name.removeprefix(prefix)) for name in ranks[0] if name.startswith(prefix))
    shares = [(float(size), statistics.median(rank[f"{prefix}{size}"][0] for rank in ranks) / whole) for size in sizes]
    return (*shares, *((size, 1.0) for size in at_whole))


def _far(prefix: str, ranks: list[dict[str, Any]]) -> tuple[tuple[float, ...], ...]:
    """Return by how much each byte takes longer within a set than within the smallest one, by the set's size [s]."""
    sizes = sorted(int(name.removeprefix(prefix)) for name in ranks[0] if name.startswith(prefix))
    times = [(float(size), statistics.median(rank[f"{prefix}{size}"][0] for rank in ranks)) for size in sizes]
    return tuple((size, max(0.0, seconds - times[0][1])) for size, seconds in times)


def _link_of(ranks: list[dict[str, Any]], source: Callable[[str], str]) -> LinkSpec:
    """Return latency and bandwidth of all-reduces: the time of the smallest, and what the largest adds for its bytes."""
    sizes = sorted(COLLECTIVE_BYTES)
    small, large = (exchange_name("all_reduce", len(ranks), size) for size in (sizes[0], sizes[-1]))
    latency = statistics.median(rank[small][0] for rank in ranks)
    seconds = statistics.median(rank[large][0] for rank in ranks)
    sent = 2 * (len(ranks) - 1) / len(ranks) * (sizes[-1] - sizes[0])
    return LinkSpec(
        name="between-ranks",
        bytes_per_s=sent / max(seconds - latency, 0.1 * seconds),
        latency_s=latency,
        sources={"bytes_per_s": source(large), "latency_s": source(small)},
    )
