"""Numbers of parameters and sizes that the code of cut parts reads: those of one device."""

from __future__ import annotations

import pytest
from tests.parity.jobs import part_jobs as jobs

from meshwright import testing


@pytest.mark.parametrize("read", jobs.READS)
def test_branches_on_a_parameter_that_grows_are_one_devices(read: str) -> None:
    for found in testing.run_ranks(jobs.gated, 2, read):
        for gap, first, most, threshold in found:
            assert first < threshold < most
            assert gap < 1e-11


@pytest.mark.parametrize("name", jobs.SIZES)
def test_sizes_that_a_part_reads_are_one_devices(name: str) -> None:
    assert max(testing.run_ranks(jobs.sized, 2, name)) < 1e-11


@pytest.mark.parametrize("read", jobs.OUTSIDE)
def test_sizes_of_a_layer_that_are_read_outside_of_it_are_one_devices(read: str) -> None:
    assert max(testing.run_ranks(jobs.scaled, 2, read)) < 1e-11
