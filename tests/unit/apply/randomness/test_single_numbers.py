"""Single numbers near the ends of their range."""

from __future__ import annotations

import pytest
import torch

from meshwright.apply.randomness import distributions
from meshwright.apply.randomness.philox import NO_SAMPLE, ElementPlace, Level
from meshwright.apply.randomness.single_numbers import moved, near_end, take_end

ALL, SAMPLE = (ElementPlace(7, (Level(1, 0, 1),), first) for first in (NO_SAMPLE, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_of_all_samples_is_near_the_end(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    plain = distributions.uniform(ALL, dtype, device), distributions.uniform(SAMPLE, dtype, device)
    for end in (0, 1):
        with near_end(end):
            number = float(distributions.uniform(ALL, dtype, device))
            assert abs(number - end) < 0.005
            assert number < 1
            assert torch.equal(distributions.uniform(SAMPLE, dtype, device), plain[1])
            flag = torch.empty(1)
            distributions.fill_bernoulli(flag, ALL, 0.5)
            assert flag.item() == 1 - end
    assert torch.equal(distributions.uniform(ALL, dtype, device), plain[0])


def test_numbers_stay_in_their_range_and_loops_end() -> None:
    assert moved(0.25, 0.0, 1.0) == 0.25
    with near_end(1):
        assert 2.99 < moved(2.0, 1.0, 3.0) < 3.0
        with near_end(None):
            assert take_end() is None
        num = 0
        while moved(0.5, 0.0, 1.0) > 0.9:
            num += 1
        assert num == 127
