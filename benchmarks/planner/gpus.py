"""Devices of published rows: the one of the table that a row's GPU is or is like, and what its data sheet says otherwise."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Final

from meshwright.hardware import DeviceSpec, known_devices, load_cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """What a row's GPU is taken for; where a number is None, the row or the table's device says it."""

    device: str
    """Whose shares of the peaks it has in the table of efficiencies."""
    like: str
    """Whose data sheet it has in the table of devices, but for the numbers below."""
    peak_tflops: float | None = None
    """Dense, in bf16 or fp16 [TFLOP/s]."""
    memory_gb: float | None = None
    memory_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    """To its neighbours in the host, one direction [GB/s]."""


def _known(name: str, like: str | None = None, **numbers: float) -> Gpu:
    return Gpu(name, like or name, **numbers)


_NAMES: Final = (
    (r"v100.*sxm3.*32", _known("v100-sxm3-32gb", "v100-sxm2-32gb")),
    (r"v100.*16", _known("v100-sxm2-16gb")),
    (r"v100", _known("v100-sxm2-32gb")),
    (r"h100.*(96|hbm2e).*500w|h100.*hbm2e", _known("h100-hbm2e-500w", "h100-sxm", memory_gb_per_s=2400)),
    (r"a800.*pci", _known("a100-sxm-80gb", memory_gb_per_s=1935, link_gb_per_s=32)),
    (r"a800", _known("a100-sxm-80gb", link_gb_per_s=200)),
    (r"a100.*pci.*40|a100.*40.*pci", _known("a100-sxm-40gb", link_gb_per_s=32)),
    (r"a100.*pci", _known("a100-sxm-80gb", memory_gb_per_s=1935, link_gb_per_s=32)),
    (r"a100.*40", _known("a100-sxm-40gb")),
    (r"a100", _known("a100-sxm-80gb")),
    (r"gh200", _known("h100-sxm", memory_gb=96, memory_gb_per_s=4000)),
    (r"h100.*(pci|nvl)", _known("h100-pcie")),
    (r"h800", _known("h100-sxm", link_gb_per_s=200)),
    (r"h100", _known("h100-sxm")),
    (r"h200", _known("h200-sxm")),
    (r"h20(?!\d)", _known("h100-sxm", peak_tflops=148, memory_gb=96, memory_gb_per_s=4000)),
    (r"gb300", _known("gb300", "b200")),
    (r"gb200", _known("gb200", "b200")),
    (r"b300", _known("b300", "b200")),
    (r"b200|b100", _known("b200")),
    (r"mi355", _known("mi355x", "mi300x", peak_tflops=2500, memory_gb=288, memory_gb_per_s=8000)),
    (r"mi350", _known("mi355x", "mi300x", peak_tflops=2300, memory_gb=288, memory_gb_per_s=8000)),
    (r"mi325", _known("mi325x", "mi300x", memory_gb=256, memory_gb_per_s=6000)),
    (r"mi300", _known("mi300x")),
    (r"mi250", _known("mi300x", peak_tflops=383, memory_gb=128, memory_gb_per_s=3200, link_gb_per_s=150)),
    (r"l40", _known("l40s")),
    (r"l4(?!\d)", _known("l4")),
    (r"4090", _known("rtx-4090")),
    (r"3090", _known("rtx-4090", peak_tflops=71, memory_gb=24, memory_gb_per_s=936)),
    (r"a40(?!\d)", _known("l40s", peak_tflops=149.7, memory_gb=48, memory_gb_per_s=696)),
    (r"a6000", _known("l40s", peak_tflops=154.8, memory_gb=48, memory_gb_per_s=768)),
    (r"a30(?!\d)", _known("a100-sxm-40gb", peak_tflops=165, memory_gb=24, memory_gb_per_s=933, link_gb_per_s=32)),
    (r"a10(?!\d)", _known("l4", peak_tflops=125, memory_gb=24, memory_gb_per_s=600)),
    (r"t4(?!\d)", _known("v100-sxm2-16gb", peak_tflops=65, memory_gb_per_s=300, link_gb_per_s=16)),
    (r"p100", _known("v100-sxm2-16gb", peak_tflops=21.2, memory_gb_per_s=732, link_gb_per_s=80)),
    (r"tpu.*v6|trillium", _known("a100-sxm-40gb", peak_tflops=918, memory_gb=32, memory_gb_per_s=1640, link_gb_per_s=200)),
    (r"tpu.*v5p", _known("a100-sxm-80gb", peak_tflops=459, memory_gb=95, memory_gb_per_s=2765, link_gb_per_s=300)),
    (r"tpu.*v5", _known("a100-sxm-40gb", peak_tflops=197, memory_gb=16, memory_gb_per_s=819, link_gb_per_s=100)),
    (r"tpu.*v4", _known("a100-sxm-40gb", peak_tflops=275, memory_gb=32, memory_gb_per_s=1228, link_gb_per_s=150)),
    (r"tpu.*v3", _known("v100-sxm2-32gb", peak_tflops=123, memory_gb=32, memory_gb_per_s=900, link_gb_per_s=80)),
    (r"gaudi.?3", _known("h100-sxm", peak_tflops=1835, memory_gb=128, memory_gb_per_s=3700, link_gb_per_s=300)),
    (r"gaudi.?2", _known("a100-sxm-80gb", peak_tflops=432, memory_gb=96, memory_gb_per_s=2450, link_gb_per_s=131)),
    (r"910", _known("a100-sxm-80gb", peak_tflops=313, memory_gb=64, memory_gb_per_s=1600, link_gb_per_s=196)),
)  # fmt: skip
"""Pattern of a name -> its device; the first that is found.

Source: the vendors' data sheets. A800 and H800 are A100 and H100 with 400 GB/s of NVLink, both ways together. Devices of other
makers have the shares of the NVIDIA device that is closest: nobody here has seen a row of them.
"""


def gpu_of(name: str, peak_tflops: float | None) -> Gpu:
    """Return what a row's GPU is taken for: by its name, or else by its peak.

    Raises:
        ValueError: The name is not known, and the row prints no peak.

    >>> gpu_of("NVIDIA A800-SXM4-80GB", None).like, gpu_of("H300", 3000.0).device
    ('a100-sxm-80gb', 'b200')
    """
    lowered = name.lower()
    if lowered in known_devices():
        return Gpu(lowered, lowered)
    for pattern, gpu in _NAMES:
        if re.search(rf"(?<![a-z0-9]){pattern}" if pattern[0].isalpha() else pattern, lowered):
            return gpu
    if peak_tflops is None:
        raise ValueError(f"hardware.gpu={name[:40]!r} is not known, and peak_bf16_dense_tflops is not given")
    closest = min(_by_peak(), key=lambda pair: abs(math.log(pair[1] / (peak_tflops * 1e12))))
    return Gpu(closest[0], closest[0])


def _by_peak() -> list[tuple[str, float]]:
    """Return devices of data centres, and their peaks [FLOP/s]."""
    names = ("v100-sxm2-32gb", "a100-sxm-80gb", "h100-sxm", "b200")
    return [(name, half_peak(load_cluster(name).device)) for name in names]


def half_peak(device: DeviceSpec) -> float:
    """Return the dense peak in 16 bits [FLOP/s]."""
    peaks = device.peak_flops_per_s
    return peaks.get("bf16") or peaks.get("fp16") or max(peaks.values())
