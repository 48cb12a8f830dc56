"""Collectives by protocol: small ones take the one whose steps wait least, large ones the one with most bandwidth."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.plan.costs.protocols import fastest_s

HOP, NETWORK_HOP = 3.4e-6, 14e-6
"""NCCL's own, of its protocol for large parts, inside a host and between hosts [s]."""


def seconds(moved_s: float, group: int, spread: int, rounds: int = 1) -> float:
    return fastest_s(moved_s, rounds=rounds, group=group, spread=spread, hop_s=HOP, network_hop_s=NETWORK_HOP)


def test_small_parts_wait_for_the_quick_protocol_as_nccls_table_says() -> None:
    assert seconds(0.0, 8, 1, rounds=2) == pytest.approx(14 * 0.6e-6)
    assert seconds(0.0, 16, 2) == pytest.approx(14 * 0.6e-6 + 2.7e-6)
    # An all-reduce over hosts has trees, whose steps between hosts grow with the logarithm of their number.
    assert seconds(0.0, 1024, 128, rounds=2) == pytest.approx(2 * (7 * 0.6e-6 + 7 * 5e-6))


def test_the_steps_of_a_large_ring_hide() -> None:
    waits = 1792 * HOP + 255 * NETWORK_HOP
    assert seconds(1.0, 2048, 256) == pytest.approx(1.0)
    assert seconds(2 * waits, 2048, 256) == pytest.approx(2 * waits)
    assert seconds(1e-3, 2048, 256) > 1e-3


@pytest.mark.parametrize(("group", "spread", "rounds"), [(8, 1, 1), (8, 1, 2), (64, 8, 1), (64, 8, 2), (4096, 512, 2)])
def test_more_bytes_and_more_devices_are_never_faster(group: int, spread: int, rounds: int) -> None:
    found = [seconds(10.0**power, group, spread, rounds) for power in range(-8, 1)]
    assert all(one <= other for one, other in itertools.pairwise(found))
    assert all(one >= 10.0**power for power, one in zip(range(-8, 1), found, strict=True))
    assert seconds(1e-4, 2 * group, max(1, 2 * spread if spread > 1 else 1), rounds) >= seconds(
        1e-4, group, spread, rounds
    )
    assert math.isfinite(found[0])
