"""The formulas of a comparison: their values, their inverses, and what they refuse."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.ledger import ring_bytes
from meshwright.compare.formulas import (
    Spread,
    amdahl_parallel_fraction,
    relative_difference,
    speedup,
    spread,
)
from meshwright.errors import ConfigError
from meshwright.traffic import cut_activation_bytes, replica_copy_bytes, ring_gradient_bytes

FRACTIONS = st.floats(0, 1)
DEVICES = st.integers(2, 4096)
TIMES = st.floats(1e-6, 1e6)


@given(FRACTIONS, DEVICES)
def test_amdahl_both_ways(fraction, devices):
    measured = 1 / ((1 - fraction) + fraction / devices)  # the law itself
    assert amdahl_parallel_fraction(measured, devices) == pytest.approx(fraction, abs=1e-9)


def test_amdahl_by_hand():
    assert amdahl_parallel_fraction(1.5, 2) == pytest.approx(2 / 3)


def test_a_fraction_is_shown_as_measured():
    assert amdahl_parallel_fraction(2.5, 2) == pytest.approx(1.2)  # faster than two times one device
    assert amdahl_parallel_fraction(0.5, 4) == pytest.approx(-4 / 3)  # slower than one device
    assert amdahl_parallel_fraction(0.7, 1) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: amdahl_parallel_fraction(0.0, 2),
        lambda: amdahl_parallel_fraction(math.nan, 2),
        lambda: amdahl_parallel_fraction(1.0, 0),
        lambda: speedup(0.0, 1.0),
        lambda: speedup(1.0, 0.0),
        lambda: speedup(1.0, math.nan),
        lambda: spread([]),
        lambda: ring_gradient_bytes(-1, 2),
        lambda: ring_gradient_bytes(1, 0),
        lambda: replica_copy_bytes(1, 1, -1),
        lambda: replica_copy_bytes(1, -1, 1),
        lambda: cut_activation_bytes([1], [0, 1], 1),
        lambda: cut_activation_bytes([1], [0], 1, [None, None]),
        lambda: cut_activation_bytes([1], [0], -1),
        lambda: cut_activation_bytes([-1], [0], 1),
    ],
)
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(ConfigError):
        call()


@given(TIMES, TIMES)
def test_speed_ups_invert(a, b):
    assert speedup(a, b) * speedup(b, a) == pytest.approx(1)


@given(st.lists(TIMES, min_size=1, max_size=40))
def test_a_spread_is_ordered_and_inside_the_samples(samples):
    got = spread(samples)
    assert min(samples) <= got.low * (1 + 1e-12)
    assert got.low <= got.median * (1 + 1e-12)
    assert got.median <= got.high * (1 + 1e-12)
    assert got.high <= max(samples) * (1 + 1e-12)
    assert spread(sorted(samples, reverse=True)) == got


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [((1, 2, 3), (3, 4, 5), True), ((1, 2, 3), (4, 5, 6), False), ((1, 5, 9), (4, 5, 6), True)],
)
def test_overlap_of_the_middle_halves(first, second, together):
    assert Spread(*first).overlaps(Spread(*second)) is together
    assert Spread(*second).overlaps(Spread(*first)) is together


@given(st.integers(0, 2**50), st.integers(1, 1024))
def test_the_ring_is_what_the_ledger_counts(gradient_bytes, ranks):
    # Two pieces of code, written apart: the table's ratio compares them.
    assert ring_gradient_bytes(gradient_bytes, ranks) == pytest.approx(ring_bytes("all_reduce", gradient_bytes, ranks))


@given(st.integers(1, 2**40), st.integers(2, 1024))
def test_a_ring_sends_less_than_twice_the_gradients(gradient_bytes, ranks):
    assert gradient_bytes <= ring_gradient_bytes(gradient_bytes, ranks) < 2 * gradient_bytes


LAYERS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 3)), max_size=12)


@given(LAYERS, st.integers(0, 512))
def test_a_cut_moves_what_stands_before_each_change_of_stage(layers, samples):
    sizes, stages = [size for size, _ in layers], [stage for _, stage in layers]
    changes = [size for (size, stage), (_, after) in itertools.pairwise(layers) if stage != after]
    assert cut_activation_bytes(sizes, stages, samples) == 2 * samples * sum(changes)


@given(LAYERS)
def test_one_stage_moves_nothing(layers):
    assert cut_activation_bytes([size for size, _ in layers], [0] * len(layers), 64) == 0


def test_a_tied_head_that_stands_on_the_first_stage_is_a_crossing():
    # embedding | block, block | norm | head on the embedding's stage
    assert cut_activation_bytes([10, 10, 20, 5, 100], [0, 0, 1, 1, 0], 1) == 2 * (10 + 5)


def test_a_head_outside_every_layer_is_a_crossing_too():
    assert cut_activation_bytes([10, 20], [0, 1], 3, [None, 0]) == 2 * 3 * (10 + 20)
    assert cut_activation_bytes([10, 20], [0, 1], 3, [None, 1]) == 2 * 3 * 10
    # What has come back goes out again where the next layer is elsewhere.
    assert cut_activation_bytes([10, 20, 40], [0, 1, 1], 1, [None, 0, None]) == 2 * (10 + 20 + 20)


def test_the_classic_cut():
    # Linear 2048 -> 4096, ReLU | Linear 4096 -> 2048, ReLU, Linear: 4096 floats a sample, batch 64, there and back.
    sizes = [4 * width for width in (4096, 4096, 2048, 2048, 2048)]
    assert cut_activation_bytes(sizes, [0, 0, 1, 1, 1], 64) == 2 * 64 * 4096 * 4 == 2 * 2**20


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 64))
def test_replicas_on_one_device_copy_nothing(parameters, gradients, others):
    assert replica_copy_bytes(parameters, gradients, 0) == 0
    assert replica_copy_bytes(parameters, gradients, others) == others * parameters + others * gradients


def test_relative_difference():
    assert relative_difference(0.0, 0.0) == 0
    assert relative_difference(1.0, 0.0) == math.inf
    assert relative_difference(-1.0, 1.0) == 2
    assert relative_difference(3.0, -2.0) == 2.5
