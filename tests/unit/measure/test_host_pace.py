"""measure/host_pace: how fast this host copies memory."""

from __future__ import annotations

import dataclasses

from meshwright.hardware import load_cluster
from meshwright.measure.host_pace import copy_rate, has_other_pace, pace


def test_a_rate_is_that_of_memory() -> None:
    assert 1e8 < copy_rate() < 1e12


def test_a_cluster_that_nobody_measured_has_no_pace() -> None:
    cluster = load_cluster("8xh100-sxm")
    host = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, name="cpu"))
    assert pace(host) == 1.0
    assert not has_other_pace(host)
    assert pace(dataclasses.replace(host, copied_bytes_per_s=1e15)) < 1e-2
