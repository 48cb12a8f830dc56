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
        ("2x8xl4", "no network for 'l4'"),
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
