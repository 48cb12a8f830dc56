"""Table of well-known devices, and clusters made of them."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from meshwright.errors import ConfigError, did_you_mean
from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.hardware.mixed import mixed_cluster
from meshwright.texts import parse_json, read_text

__all__: list[str] = []

_PRESET: Final = re.compile(r"(?:(?:([0-9]{1,6})x)?([0-9]{1,6})x)?([a-z][a-z0-9-]*)(?:@([a-z0-9-]+))?")

_PER_HOST: Final = 8
"""Devices of a host, where a device's row says nothing [count]."""


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices in the table, sorted.

    >>> "h100-sxm" in known_devices()
    True
    """
    return tuple(sorted(read_table()["devices"]))


def load_cluster(text: str | Path) -> ClusterSpec:
    """Return a cluster by its short name, or from a JSON file.

    Args:
        text: Devices as in "8xh100-sxm", hosts and devices as in "2x8xh100-sxm". More devices than the vendor's system connects,
            as in "64xa100-80g", are as many hosts as that makes. A network's name may follow, what a device has to other hosts:
            "4x8xl40s@roce-200". Kinds of hosts have " + " between them: "2x8xa100-80g + 4x8xh100-sxm". Or the path of a JSON file
            that ``ClusterSpec.to_json`` wrote, or of a list of such objects, one for each kind of host; what ends in ".json" or
            has a slash is a path.

    Returns:
        The cluster. One of several kinds of hosts is as slow as the slowest of them, and `made_of` names them.

    Raises:
        ConfigError: There is no such device, network or file, or what it says breaks a rule.

    >>> cluster = load_cluster("2x8xh100-sxm")
    >>> cluster.num_devices, cluster.device.peak("bf16"), cluster.link.bytes_per_s
    (16, 989400000000000.0, 450000000000.0)
    >>> load_cluster("2x8xa100-80g + 4x8xh100-sxm").device.name
    'a100-sxm-80gb'
    """
    if isinstance(text, Path) or text.endswith(".json") or "/" in text:
        return _read_cluster(Path(text))
    parts = [part.strip() for part in text.lower().split("+")]
    if len(parts) == 1:
        return _parse(parts[0])
    return mixed_cluster([_parse(part, needs_network=True) for part in parts])


def _parse(text: str, *, needs_network: bool = False) -> ClusterSpec:
    match = _PRESET.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"cluster: '{text}' is neither a short name nor a JSON file",
            fix="write it as in '8xh100-sxm', '2x8xh100-sxm' or '4x8xl40s@roce-200'",
        )
    hosts, devices, word, network = match.groups()
    table = read_table()
    rows = table["devices"]
    name = table["aliases"].get(word, word)
    if name not in rows:
        raise ConfigError(
            f"cluster: there is no device '{word}'{did_you_mean(word, rows)}; known: {', '.join(known_devices())}",
            fix="use one of these, or a JSON file with a ClusterSpec",
        )
    row = rows[name]
    num_hosts, in_host = int(hosts or 1), int(devices or 1)
    if hosts is None:
        num_hosts, in_host = _whole_hosts(text, in_host, row.get("per_host", _PER_HOST))
    network = _network_of(text, network) or row.get("network")
    if (num_hosts > 1 or needs_network) and network is None:
        raise ConfigError(
            f"cluster: '{text}' has {num_hosts} host(s), and the table has no network for '{name}' "
            "(rule: no number without a source)",
            fix=f"name what a device has to other hosts, as in '{text}@{_networks()[0]}' (known: {', '.join(_networks())}), or "
            "give a JSON file with a ClusterSpec that has a network",
        )
    return ClusterSpec(
        name=text,
        device=_device(name),
        devices_per_host=in_host,
        num_hosts=num_hosts,
        link=_link(row["link"]) if "link" in row else None,
        network=None if network is None else _link(network),
    )


def _whole_hosts(text: str, devices: int, per_host: int) -> tuple[int, int]:
    """Return hosts and devices of each, for a number of devices alone."""
    if devices <= per_host:
        return 1, devices
    if devices % per_host:
        raise ConfigError(
            f"cluster: '{text}' has {devices} devices (rule: up to {per_host}, or whole hosts of {per_host})",
            fix=f"write hosts and devices of each, as in '{-(-devices // per_host)}x{per_host}x{text.partition('x')[2]}'",
        )
    return devices // per_host, per_host


def _networks() -> list[str]:
    """Return the names of links that are networks of no one system."""
    rows = read_table()
    owned = {row[key] for row in rows["devices"].values() for key in ("link", "network") if key in row}
    return [name for name in rows["links"] if name not in owned]


def _network_of(text: str, name: str | None) -> str | None:
    if name is not None and name not in _networks():
        raise ConfigError(
            f"cluster: '{text}' names the network '{name}'{did_you_mean(name, _networks())}; known: {', '.join(_networks())}",
            fix="use one of these, or a JSON file with a ClusterSpec",
        )
    return name


@functools.cache
def read_table() -> Mapping[str, Any]:
    """Return devices.toml as it is: tables ``sources``, ``links`` and ``devices``."""
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))


def _read_cluster(path: Path) -> ClusterSpec:
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(
            f"cluster: the file '{path}' cannot be read: {error}", fix="write a short name as in '8xh100-sxm'"
        ) from error
    import json

    if not text.lstrip().startswith("["):
        return ClusterSpec.from_json(text)
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"cluster: the file '{path}' is not JSON: {error}", fix="mend it, or write it anew"
        ) from error
    return mixed_cluster([ClusterSpec.from_json(json.dumps(entry)) for entry in entries])


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
