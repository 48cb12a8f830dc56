"""Seconds of kernels and collectives on one kind of cluster."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Final

from meshwright.hardware import ClusterSpec
from meshwright.hardware.efficiency import Efficiency, curve_at, share_at, time_of_work
from meshwright.hardware.exchanges import exchange_s
from meshwright.plan.costs.protocols import fastest_s
from meshwright.spec.layer import HostCalls
from meshwright.values import Problems

__all__: list[str] = []

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""(rows, columns, speed): the tiles that a matrix product is cut into; a smaller one reads its operands more often.
Source of the shapes: CUTLASS, media/docs/cpp/efficient_gemm.md, read 2026-11-24. The speeds are estimates."""

_LEAST_DEPTH: Final = 512
"""Elements of the inner size that are left to a tile where several tiles share one place of a small result, as those of weights'
gradients do: libraries cut it ("Parallelized Reductions", CUTLASS, efficient_gemm.md, read 2026-11-26). An estimate [count]."""

_SHARP: Final = 16
"""Exponent of the maximum of the host's and the device's time: both alike take 4 % longer than one. An estimate: the host is many
kernels ahead wherever it is the faster one."""

_MISALIGNED: Final = 7.0
"""Products whose inner size is no multiple of 8 elements leave the tensor cores' layout [ratio of times].
Source of the rule: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements"; the ratio is fitted to
BigScience's rows with heads of 108 and 150 elements."""

_ROUNDS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often the tensor goes round, but for one rank's part of it [count]."""

_SUM_BYTES: Final = 4
"""Size of an element of a part's sums, which are written and read [bytes]."""

_REAL_KINDS: Final = {"fp16": "bf16", "mxfp8": "fp8", "nvfp4": "fp4"}


@dataclasses.dataclass(slots=True)
class Moved:
    """Memory that kernels read and write [bytes]."""

    traffic_bytes: float = 0.0
    """By elementwise kernels."""
    product_bytes: float = 0.0
    """By products and attention."""


def product_bytes(sizes: tuple[int, int, int], count: float, element_bytes: float) -> float:
    """Return what ``count`` products of (rows, inner) by (inner, columns) read and write, by these three sizes [bytes]."""
    rows, inner, columns = sizes
    return element_bytes * count * (rows * inner + inner * columns + rows * columns)


class Machine:
    """What kernels and collectives take on the devices of a cluster.

    Args:
        cluster: Devices and links.
        efficiency: Shares of their peaks.
    """

    def __init__(self, cluster: ClusterSpec, efficiency: Efficiency) -> None:
        self.cluster = cluster
        self.efficiency = efficiency
        device = cluster.device
        self.memory_bytes_per_s = (device.memory_bytes_per_s or math.inf) * efficiency.memory
        self.link_bytes_per_s = (cluster.link.bytes_per_s if cluster.link else math.inf) * efficiency.link
        self.network_bytes_per_s = (cluster.network.bytes_per_s if cluster.network else math.inf) * efficiency.network
        self.product_s = functools.lru_cache(maxsize=100_000)(self._product_s)

    def flops_per_s(self, dtype: str) -> float:
        """Return the arithmetic that large products reach in a dtype [FLOP/s]."""
        kind = _REAL_KINDS.get(dtype, dtype)
        shares = self.efficiency.matmul
        share = shares.get(kind, min(shares.values()))
        return self.peak(dtype) * share

    def peak(self, dtype: str) -> float:
        """Return the dense peak of a dtype; where it is unknown, that of the closest one that is known [FLOP/s]."""
        peaks = self.cluster.device.peak_flops_per_s
        kind = _REAL_KINDS.get(dtype, dtype)
        if kind in peaks:
            return peaks[kind]
        if kind == "bf16" and "fp16" in peaks:
            return peaks["fp16"]
        return peaks["fp32"] if "fp32" in peaks else min(peaks.values())

    def traffic_s(self, num_bytes: float) -> float:
        """Return the time of one elementwise kernel that moves so much [s]."""
        share = share_at(num_bytes, self.efficiency.traffic_curve)
        return max(num_bytes / (self.memory_bytes_per_s * share), self.efficiency.kernel_s)

    def far_s(self, moved: Moved, kept_bytes: float) -> float:
        """Return what kernels take longer where so much is kept between forward and backward that no cache holds it [s]."""
        efficiency = self.efficiency
        seconds = moved.traffic_bytes * curve_at(kept_bytes, efficiency.far_traffic)
        return seconds + moved.product_bytes * curve_at(kept_bytes, efficiency.far_product)

    def issue_s(self, calls: HostCalls) -> tuple[float, float]:
        """Return what the host takes to issue a forward, and its backward [s]."""
        counts = {
            "operator": (calls.operators, calls.differentiated),
            "view": (calls.views, calls.differentiated_views),
            "module": (calls.modules, 0),
        }
        times = {kind: self.efficiency.host.get(kind, (0.0, 0.0)) for kind in counts}
        forward, backward = (sum(counts[kind][way] * times[kind][way] for kind in counts) for way in (0, 1))
        return forward, backward

    def convolution_s(self, flops: float) -> tuple[float, float] | None:
        """Return what a convolution of so much arithmetic takes in forward and in backward [s]; None where none was measured."""
        rows = self.efficiency.convolution
        return (time_of_work(flops, rows, 1), time_of_work(flops, rows, 2)) if rows else None

    def _product_s(
        self, sizes: tuple[int, int, int], count: float, dtype: str, element_bytes: float, *, aligned: bool
    ) -> float:
        """Return the time of ``count`` products of (rows, inner) by (inner, columns), by these three sizes [s]."""
        rows, inner, columns = sizes
        units = self.efficiency.num_units
        rate = self.flops_per_s(dtype) * share_at(2.0 * rows * inner * columns, self.efficiency.product_curve)
        if units == 1:
            arithmetic = 2.0 * count * rows * (inner + self.efficiency.inner_overhead) * columns / rate
        else:
            arithmetic = min(self._tiled_s(sizes, count, rate * speed, tile) for *tile, speed in _TILES)
        moved = product_bytes(sizes, count, element_bytes)
        factor = 1.0 if aligned or units == 1 else _MISALIGNED
        return max(arithmetic * factor, moved / self.memory_bytes_per_s, self.efficiency.kernel_s)

    def _tiled_s(self, sizes: tuple[int, int, int], count: float, rate: float, tile: Sequence[float]) -> float:
        """Return the time of products that are cut into tiles, one for each unit of the device at a time [s]."""
        rows, inner, columns = sizes
        height, width = tile
        units = self.efficiency.num_units
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        parts = max(1, min(int(units / tiles), inner // _LEAST_DEPTH))
        depth = inner / parts + self.efficiency.inner_overhead
        seconds = _waves(tiles * parts / units) * (2.0 * height * width * depth * units / rate)
        if parts == 1:
            return seconds
        return seconds + 2 * _SUM_BYTES * parts * count * rows * columns / self.memory_bytes_per_s

    def collective_s(self, kind: str, num_bytes: float, group: int, spread: int) -> float:
        """Return the time of a collective of a tensor [s].

        Args:
            kind: "all_reduce", "all_gather" or "reduce_scatter".
            num_bytes: The whole tensor [bytes].
            group: Devices that take part [count].
            spread: Hosts that they are on [count].
        """
        if group <= 1:
            return 0.0
        if spread <= 1 and (rows := self.efficiency.exchanges.get(kind)):
            return exchange_s(rows, num_bytes, group)
        rounds, share = _ROUNDS[kind], (group - 1) / group * num_bytes
        rate, fixed_s = self.link_bytes_per_s, self.efficiency.link_latency_s
        if spread > 1:
            ports = self.network_bytes_per_s * (1 + (max(1, group // spread) - 1) * self.efficiency.rails)
            rate, fixed_s = min(rate, ports), self.efficiency.network_latency_s
        return fixed_s + fastest_s(
            rounds * share / rate,
            rounds=rounds,
            group=group,
            spread=spread,
            hop_s=self.efficiency.hop_s,
            network_hop_s=self.efficiency.network_hop_s,
        )

    def message_s(self, num_bytes: float, *, inside: bool) -> float:
        """Return the time of a message to a neighbour, in the same host or in another one [s]."""
        if inside and (rows := self.efficiency.exchanges.get("message")):
            return exchange_s(rows, num_bytes, 2)
        if inside:
            return num_bytes / self.link_bytes_per_s + self.efficiency.link_latency_s
        return num_bytes / self.network_bytes_per_s + self.efficiency.network_latency_s


def issued_s(device_s: float, host_s: float, *, ahead: bool) -> float:
    """Return the time of what the host issues to the device [s]: their sum where it does not run ahead."""
    if not ahead:
        return device_s + host_s
    # A smooth maximum: passes that the host can just feed wait for it here and there.
    return (device_s**_SHARP + host_s**_SHARP) ** (1 / _SHARP)


def _waves(waves: float) -> float:
    # The last wave is partly empty; libraries cut some of its tiles along the inner size, which fills half of the gap.
    return max(1.0, 0.5 * math.ceil(waves) + 0.5 * waves)


def require_numbers(cluster: ClusterSpec) -> None:
    """Refuse what would cost nothing, or what no plan computes in."""
    device, problems = cluster.device, Problems(f"cluster '{cluster.name}'")
    problems.require(
        any(dtype in device.peak_flops_per_s for dtype in ("fp32", "bf16", "fp16")),
        f"peak_flops_per_s of {', '.join(device.peak_flops_per_s) or 'nothing'} (rule: fp32, bf16 or fp16 is there)",
        fix="give the device peak_flops_per_s of fp32 and bf16",
    )
    problems.require(
        device.memory_bytes_per_s is not None,
        "memory_bytes_per_s is not known (rule: what an operator takes depends on it)",
        fix="give the device memory_bytes_per_s",
    )
    problems.require(
        cluster.devices_per_host == 1 or cluster.link is not None,
        f"{cluster.devices_per_host} devices in a host and no link (rule: what they exchange takes time)",
        fix="give the cluster a LinkSpec as link, or measure it by `meshwright probe`",
    )
    problems.check()
