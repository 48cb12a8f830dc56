"""Listing of a probe: what `meshwright probe` prints."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.errors import StorageError
from meshwright.hardware.cluster import ClusterSpec
from meshwright.hardware.exchanges import Rows
from meshwright.measure.probe_cores import disturbed_text, is_disturbed
from meshwright.units import format_bandwidth, format_bytes, format_seconds

__all__: list[str] = []


def show_stage(name: str, index: int, count: int) -> None:
    """Print which measurement has begun: over the line before on a terminal, as a line of its own elsewhere."""
    text = f"probe {index + 1}/{count}: {name}"
    if sys.stderr.isatty():
        end = "\n" if index + 1 == count else ""
        text = f"\r\x1b[K{text} [{'#' * (index + 1)}{'.' * (count - index - 1)}]{end}"
    else:
        text += "\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def save_cluster(cluster: ClusterSpec, path: Path) -> None:
    """Write a cluster as JSON.

    Raises:
        StorageError: The file cannot be written.
    """
    try:
        path.write_text(cluster.to_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the cluster could not be written to {path}: {error.strerror}", fix="-o cluster.json"
        ) from error


def show_cluster(cluster: ClusterSpec) -> str:
    """Return a measured cluster as text."""
    device, efficiency = cluster.device, cluster.efficiency
    rows = [
        (f"products in {dtype}", f"{rate / 1e9:.4g} GFLOP/s", f"peak_flops_per_s.{dtype}")
        for dtype, rate in device.peak_flops_per_s.items()
    ]
    if device.memory_bytes_per_s is not None:
        rows.append(("memory", format_bandwidth(device.memory_bytes_per_s), "memory_bytes_per_s"))
    lines = [f"{cluster.name}: {cluster.devices_per_host} x {device.name}, {format_bytes(device.memory_bytes)} each"]
    lines += [f"{name:18}{value:16}{device.sources.get(key, '')}" for name, value, key in rows]
    if efficiency is not None:
        lines.append(f"{'an operator':18}{format_seconds(efficiency.operator_s)}")
    if cluster.link is not None:
        link = cluster.link
        lines.append(f"{'all-reduce':18}{format_bandwidth(link.bytes_per_s):16}{link.sources.get('bytes_per_s', '')}")
        lines.append(f"{'':18}{format_seconds(link.latency_s or 0.0):16}{link.sources.get('latency_s', '')}")
    if efficiency is not None:
        lines += [_show_exchange(kind, rows) for kind, rows in efficiency.exchanges.items()]
    if is_disturbed(cluster):
        lines.append(f"warning: {disturbed_text(cluster)}")
    return "\n".join(line.rstrip() for line in lines)


def _show_exchange(kind: str, rows: Rows) -> str:
    """Return the times of the smallest and the largest size among most ranks."""
    most = [row for row in rows if row[0] == rows[-1][0]]
    times = ", ".join(
        f"{format_seconds(seconds)} for {format_bytes(int(size))}" for _, size, seconds in (most[0], most[-1])
    )
    return f"{kind.replace('_', '-'):18}{times}, {most[0][0]:.0f} ranks"
