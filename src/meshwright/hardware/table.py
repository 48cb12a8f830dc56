"""Table of well-known devices, and clusters made of them."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError, did_you_mean
from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec

__all__: list[str] = []

_PRESET: Final = re.compile(r"(?:(?:([0-9]{1,6})x)?([0-9]{1,6})x)?([a-z][a-z0-9-]*)")


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices in the table, sorted.

    >>> "h100-sxm" in known_devices()
    True
    """
    return tuple(sorted(read_table()["devices"]))


def load_cluster(text: str | Path) -> ClusterSpec:
    """Return a cluster by its short name, or from a JSON file.

    Args:
        text: Devices as in "8xh100-sxm", hosts and devices as in "2x8xh100-sxm", or the path of a JSON file that
            ``ClusterSpec.to_json`` wrote; what ends in ".json" or has a slash is a path.

    Returns:
        The cluster.

    Raises:
        ConfigError: There is no such device or file, or what it says breaks a rule.

    >>> cluster = load_cluster("2x8xh100-sxm")
    >>> cluster.num_devices, cluster.device.peak("bf16"), cluster.link.bytes_per_s
    (16, 989400000000000.0, 450000000000.0)
    """
    if isinstance(text, Path) or text.endswith(".json") or "/" in text:
        return _read_cluster(Path(text))
    match = _PRESET.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"cluster: '{text}' is neither a short name nor a JSON file",
            fix="write it as in '8xh100-sxm' or '2x8xh100-sxm'",
        )
    hosts, devices, name = match.groups()
    rows = read_table()["devices"]
    if name not in rows:
        raise ConfigError(
            f"cluster: there is no device '{name}'{did_you_mean(name, rows)}; known: {', '.join(known_devices())}",
            fix="use one of these, or a JSON file with a ClusterSpec",
        )
    num_hosts = int(hosts or 1)
    row = rows[name]
    if num_hosts > 1 and "network" not in row:
        raise ConfigError(
            f"cluster: '{text}' has {num_hosts} hosts, and the table has no network for '{name}' "
            "(rule: no number without a source)",
            fix=f"use '{devices}x{name}', or a JSON file with a ClusterSpec that has a network",
        )
    return ClusterSpec(
        name=text.strip().lower(),
        device=_device(name),
        devices_per_host=int(devices or 1),
        num_hosts=num_hosts,
        link=_link(row["link"]) if "link" in row else None,
        network=_link(row["network"]) if "network" in row else None,
    )


@functools.cache
def read_table() -> Mapping[str, Any]:
    """Return devices.toml as it is: tables ``sources``, ``links`` and ``devices``."""
    return tomllib.loads(resources.files("meshwright.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))


def _read_cluster(path: Path) -> ClusterSpec:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cluster: the file '{path}' cannot be read: {error}", fix="write a short name as in '8xh100-sxm'"
        ) from error
    return ClusterSpec.from_json(text)


def _device(name: str) -> DeviceSpec:
    row = read_table()["devices"][name]
    peaks: dict[str, Any] = row["peak_flops_per_s"]
    cells = {key: row[key] for key in ("memory_bytes", "memory_bytes_per_s")}
    return DeviceSpec(
        name=name,
        memory_bytes=row["memory_bytes"]["value"],
        memory_bytes_per_s=row["memory_bytes_per_s"]["value"],
        peak_flops_per_s={dtype: cell["value"] for dtype, cell in peaks.items()},
        sources={key: _cite(cell) for key, cell in cells.items()}
        | {f"peak_flops_per_s.{dtype}": _cite(cell) for dtype, cell in peaks.items()},
    )


def _link(name: str) -> LinkSpec:
    cell = read_table()["links"][name]["bytes_per_s"]
    return LinkSpec(name=name, bytes_per_s=cell["value"], sources={"bytes_per_s": _cite(cell)})


def _cite(cell: Mapping[str, Any]) -> str:
    source = read_table()["sources"][cell["source"]]
    return f"{source['title']}, {source['date']}, {source['url']}"
