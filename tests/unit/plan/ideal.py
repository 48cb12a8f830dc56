"""Efficiency of a CPU host on which nothing takes time but arithmetic and bytes: what a test adds is all there is."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.hardware.efficiency import Efficiency

IDEAL = Efficiency(
    num_units=1, matmul={"fp32": 1.0, "bf16": 1.0}, memory=1.0, attention_forward=0.5, attention_backward=0.4,
    inner_overhead=0.0, elementwise_passes=1.0, kernel_s=0.0, operator_s=0.0, collective_host_s=0.0, link=1.0, network=1.0,
    rails=1.0, link_latency_s=0.0, network_latency_s=0.0, hop_s=0.0, tp_overlap=0.0, interference=0.0, overlap=0.0,
    optimizer_bytes=28.0, step_s=0.0, issues_ahead=False,
)  # fmt: skip


def ideal_with(**changes: Any) -> Efficiency:
    """Return it with other values of some fields."""
    return dataclasses.replace(IDEAL, **changes)
