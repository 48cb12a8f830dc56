"""Clusters of several kinds of hosts, planned for as if all devices were the slowest of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.errors import ConfigError
from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec

__all__: list[str] = []

_MOST_TELLING = ("bf16", "fp16", "tf32", "fp32")


def mixed_cluster(parts: Sequence[ClusterSpec]) -> ClusterSpec:
    """Return one cluster of several kinds of hosts: of each number the smallest, since all ranks wait for the slowest one.

    A host with more devices than others counts as several hosts, so that groups of ranks lie on one host of every kind.

    Args:
        parts: The kinds of hosts; each has a network.

    Raises:
        ConfigError: There are fewer than two parts, one has no network, or no rate is known for all of them.
    """
    if len(parts) < 2:
        raise ConfigError(
            f"cluster: a list of {len(parts)} kinds of hosts (rule: two or more)", fix="give one ClusterSpec"
        )
    without = next((part for part in parts if part.network is None), None)
    if without is not None:
        raise ConfigError(
            f"cluster: '{without.name}' has no network (rule: kinds of hosts reach each other)",
            fix="give it a LinkSpec as network",
        )
    in_host = math.gcd(*(part.devices_per_host for part in parts))
    slowest = min(parts, key=lambda part: _rate(part.device))
    measured = [part.efficiency for part in parts if part.efficiency is not None]
    return ClusterSpec(
        name=" + ".join(part.name for part in parts),
        device=_weakest([part.device for part in parts], slowest.device.name),
        devices_per_host=in_host,
        num_hosts=sum(part.num_devices for part in parts) // in_host,
        link=_slowest([part.link for part in parts]) if in_host > 1 else None,
        network=_slowest([part.network for part in parts]),
        efficiency=slowest.efficiency if measured else None,
        made_of=tuple(f"{part.num_hosts} x {part.devices_per_host} x {part.device}" for part in parts),
    )


def _rate(device: DeviceSpec) -> float:
    return next((device.peak_flops_per_s[dtype] for dtype in _MOST_TELLING if dtype in device.peak_flops_per_s), 0.0)


def _weakest(devices: Sequence[DeviceSpec], name: str) -> DeviceSpec:
    """Return a device that has the smallest of each number, under the slowest one's name."""
    dtypes = [dtype for dtype in devices[0].peak_flops_per_s if all(dtype in one.peak_flops_per_s for one in devices)]
    if not dtypes:
        raise ConfigError(
            f"cluster: {' and '.join(one.name for one in devices)} have no dtype in common (rule: a rate that is known for all)",
            fix="give the devices peak_flops_per_s of fp32 and bf16",
        )
    of_dtypes = {dtype: min(devices, key=lambda one: one.peak_flops_per_s[dtype]) for dtype in dtypes}
    least = min(devices, key=lambda one: one.memory_bytes)
    known = [one for one in devices if one.memory_bytes_per_s is not None]
    thinnest = min(known, key=lambda one: one.memory_bytes_per_s or math.inf) if len(known) == len(devices) else None
    sources: dict[str, str] = {"memory_bytes": _source(least, "memory_bytes")}
    if thinnest is not None:
        sources["memory_bytes_per_s"] = _source(thinnest, "memory_bytes_per_s")
    sources |= {
        f"peak_flops_per_s.{dtype}": _source(one, f"peak_flops_per_s.{dtype}") for dtype, one in of_dtypes.items()
    }
    return DeviceSpec(
        name=name,
        memory_bytes=least.memory_bytes,
        memory_bytes_per_s=None if thinnest is None else thinnest.memory_bytes_per_s,
        peak_flops_per_s={dtype: one.peak_flops_per_s[dtype] for dtype, one in of_dtypes.items()},
        sources=sources,
    )


def _source(device: DeviceSpec, key: str) -> str:
    sources: Mapping[str, str] = device.sources
    return f"{device.name}: {sources.get(key, 'no source')}"


def _slowest(links: Sequence[LinkSpec | None]) -> LinkSpec | None:
    known = [link for link in links if link is not None]
    return min(known, key=lambda link: link.bytes_per_s) if len(known) == len(links) else None
