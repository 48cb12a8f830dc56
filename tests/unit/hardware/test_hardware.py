from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from tests.unit.strategies import clusters

from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, DeviceSpec, LinkSpec, known_devices, load_cluster
from meshwright.hardware.cluster import DTYPES
from meshwright.hardware.table import read_table


def faults_of_table(table) -> list[str]:
    """Return every number without a source, and every peak that is not known to be dense."""
    faults = []
    for name, source in table["sources"].items():
        if not re.fullmatch(r"https://\S+", source.get("url", "")):
            faults.append(f"source {name}: no URL")
        if not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])(-\d\d)?", source.get("date", "")):
            faults.append(f"source {name}: no date")
        if re.match(r"https://github\.com/[^/]+/[^/]+/blob/(?![0-9a-f]{40}/)", source.get("url", "")):
            faults.append(f"source {name}: no commit")
    for name, row in [*table["links"].items(), *table["devices"].items()]:
        for key, cell in row.items():
            if key in ("link", "network"):
                faults += [] if cell in table["links"] else [f"{name}.{key}: no such link"]
            elif key == "peak_flops_per_s":
                for dtype, peak in cell.items():
                    faults += _faults_of_peak(f"{name}.{dtype}", peak, table)
            elif key == "per_host":
                faults += [] if isinstance(cell, int) and cell > 0 else [f"{name}.per_host: no count"]
            elif key != "title":
                faults += _faults_of_number(f"{name}.{key}", cell, table)
    return faults


def _faults_of_number(place: str, cell, table) -> list[str]:
    if not isinstance(cell, dict):
        return [f"{place}: a number without a source"]
    faults = [] if cell.get("source") in table["sources"] else [f"{place}: no such source"]
    return faults if cell.get("value", 0) > 0 else [*faults, f"{place}: no value"]


def _faults_of_peak(place: str, cell, table) -> list[str]:
    faults = _faults_of_number(place, cell, table)
    if not faults and cell.get("dense") is not True:
        faults.append(f"{place}: not dense")
    if not faults and cell.get("with_sparsity", 2 * cell["value"]) != 2 * cell["value"]:
        faults.append(f"{place}: not half of the rate with sparsity")
    return faults


def test_every_number_has_source_and_date_and_every_peak_is_dense() -> None:
    assert faults_of_table(read_table()) == []


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (1e12, "without a source"),
        ({"value": 1e12, "dense": True}, "no such source"),
        ({"value": 1e12, "dense": True, "source": "undated"}, "no date"),
        ({"value": 1e12, "source": "good"}, "not dense"),
        ({"value": 2e12, "with_sparsity": 2e12, "dense": True, "source": "good"}, "not half"),
        ({"dense": True, "source": "good"}, "no value"),
        ({"value": 1e12, "dense": True, "source": "branch"}, "no commit"),
    ],
)
def test_the_check_finds_a_planted_fault(cell, fault: str) -> None:
    sources = {"good": {"url": "https://x.org/a", "date": "2024-01"}}
    if fault == "no commit":
        sources["branch"] = {"url": "https://github.com/x/y/blob/main/z.py", "date": "2024-01"}
    if fault == "no date":
        sources["undated"] = {"url": "https://x.org/b"}
    table = {"sources": sources, "links": {}, "devices": {"x": {"peak_flops_per_s": {"bf16": cell}}}}
    assert any(fault in line for line in faults_of_table(table))


def test_sources_are_used() -> None:
    table = read_table()
    rows = [*table["devices"].values(), *table["links"].values()]
    cells = [cell for row in rows for cell in [*row.values(), *row.get("peak_flops_per_s", {}).values()]]
    used = {cell["source"] for cell in cells if isinstance(cell, dict) and "source" in cell}
    assert used == set(table["sources"])


@pytest.mark.parametrize("name", known_devices())
def test_every_device_loads_and_cites_every_number(name: str) -> None:
    device = load_cluster(name).device
    numbers = {
        "memory_bytes",
        "memory_bytes_per_s",
        *(f"peak_flops_per_s.{dtype}" for dtype in device.peak_flops_per_s),
    }
    assert set(device.sources) == numbers
    assert all("https://" in source for source in device.sources.values())
    peaks = device.peak_flops_per_s
    ladder = [peaks[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in peaks]
    assert ladder == sorted(ladder)  # fewer bits are never slower
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02)
    assert set(peaks) <= set(DTYPES)


def test_peaks_are_dense_not_the_sparse_ones_of_the_advertisement() -> None:
    assert load_cluster("h100-sxm").device.peak("bf16") == pytest.approx(989e12, rel=0.001)
    assert load_cluster("a100-sxm-80gb").device.peak("bf16") == 312e12
    with pytest.raises(ConfigError, match="the peak for fp8 is not known"):
        load_cluster("a100-sxm-80gb").device.peak("fp8")


def test_short_names() -> None:
    one = load_cluster("8xh100-sxm")
    assert (one.num_hosts, one.devices_per_host, one.num_devices) == (1, 8, 8)
    assert one.link is not None
    assert one.link.bytes_per_s == 450e9
    two = load_cluster("2x8xH100-SXM")
    assert (two.num_hosts, two.devices_per_host, two.num_devices) == (2, 8, 16)
    assert two.network is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xh100", r"no device 'h100' \(did you mean 'h100-sxm'\?\)"),
        ("0xl4", "devices_per_host=0"),
        ("0x8xl4", "num_hosts=0"),
        ("200000x8xh100-sxm", "at most 1048576 devices in all"),
        ("2x8xl4", "no network for 'l4'"),
        ("16xl4", "2 host.s., and the table has no network for 'l4'"),
        ("12xl4", "12 devices .rule: up to 8, or whole hosts of 8."),
        ("2x8xl4@roce", r"the network 'roce' \(did you mean 'roce-"),
        ("8xh100-sxm + 8xl4", "no network for 'l4'"),
        ("8xh100-sxm + ", "neither a short name"),
        ("8x", "neither a short name nor a JSON file"),
        ("", "neither a short name nor a JSON file"),
        ("none.json", "cannot be read"),
        ("./none", "cannot be read"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cluster(text)


@given(clusters())
def test_json_round_trip(cluster: ClusterSpec) -> None:
    copy = ClusterSpec.from_json(cluster.to_json())
    assert copy == cluster
    assert copy.hash == cluster.hash
    assert copy.device.sources == cluster.device.sources


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(load_cluster("2x8xb200").to_json(indent=1))
    assert load_cluster(path) == load_cluster(str(path)) == load_cluster("2x8xb200")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="the format is None"):
        load_cluster(path)


def test_impossible_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*memory_bytes=0.*did you mean 'bf16'.*peak_flops_per_s"):
        DeviceSpec(name="x", memory_bytes=0, peak_flops_per_s={"bf61": 0.0})
    with pytest.raises(ConfigError, match="2 problems"):
        LinkSpec(name="x", bytes_per_s=0.0, latency_s=-1.0)
    with pytest.raises(ConfigError, match="several hosts need one"):
        ClusterSpec(name="x", device=DeviceSpec(name="x", memory_bytes=1), devices_per_host=1, num_hosts=2)


def test_more_devices_than_a_host_has_are_hosts() -> None:
    for text, hosts, in_host in (("64xa100-80g", 8, 8), ("72xgb200", 1, 72), ("144xgb300", 2, 72), ("8xl40s", 1, 8)):
        cluster = load_cluster(text)
        assert (cluster.num_hosts, cluster.devices_per_host) == (hosts, in_host)
    assert load_cluster("64xa100-80g").device.name == "a100-sxm-80gb"


def test_a_network_can_be_named() -> None:
    cluster = load_cluster("4x8xl40s@roce-200")
    assert cluster.network is not None
    assert (cluster.num_devices, cluster.network.bytes_per_s) == (32, 25e9)
    with pytest.raises(ConfigError) as caught:
        load_cluster("2x8xl40s")
    assert load_cluster(str(caught.value.fix).split("'")[1]).num_hosts == 2


def test_aliases_name_devices() -> None:
    table = read_table()
    assert set(table["aliases"].values()) <= set(table["devices"])
    assert not set(table["aliases"]) & set(table["devices"])


def test_kinds_of_hosts_are_taken_for_the_slowest_with_the_least_memory() -> None:
    cluster = load_cluster("2x8xa100-40g + 4x4xh100-sxm")
    slow, fast = load_cluster("a100-40g").device, load_cluster("h100-sxm").device
    assert (cluster.num_devices, cluster.devices_per_host, cluster.num_hosts) == (32, 4, 8)
    assert cluster.device.name == slow.name
    assert cluster.device.memory_bytes == slow.memory_bytes < fast.memory_bytes
    assert cluster.device.peak("bf16") == slow.peak("bf16")
    assert "fp8" not in cluster.device.peak_flops_per_s
    assert cluster.network == load_cluster("2x8xa100-40g").network
    assert cluster.made_of == ("2 x 8 x a100-sxm-40gb, 37.25 GiB", "4 x 4 x h100-sxm, 74.51 GiB")
    assert ClusterSpec.from_json(cluster.to_json()) == cluster


def test_the_least_memory_and_the_slowest_link_may_be_of_different_kinds() -> None:
    cluster = load_cluster("8xh200-sxm@roce-100 + 8xa100-80g")
    assert cluster.device.memory_bytes == 80e9
    assert cluster.network is not None
    assert cluster.network.name == "roce-100"


def test_a_file_may_list_kinds_of_hosts(tmp_path: Path) -> None:
    kinds = [load_cluster("2x8xa100-80g"), load_cluster("4x8xh100-sxm")]
    path = tmp_path / "mixed.json"
    path.write_text("[" + ",".join(kind.to_json() for kind in kinds) + "]")
    assert load_cluster(path) == load_cluster("2x8xa100-80g + 4x8xh100-sxm")
    path.write_text("[" + kinds[0].to_json() + "]")
    with pytest.raises(ConfigError, match="two or more"):
        load_cluster(path)
    path.write_text("[{]")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_cluster(path)
