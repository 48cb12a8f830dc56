"""What a probe makes of its samples."""

from __future__ import annotations

import pytest

from meshwright.measure.probe_sizes import added, expected


def test_one_pause_of_a_core_is_not_what_a_plan_adds() -> None:
    differences = [1.0e-3, 1.2e-3] * 8
    assert added(differences) == pytest.approx(1.1e-3)
    assert added([*differences[:-1], 0.1]) == pytest.approx(1.1e-3, rel=0.03)  # the mean would be seven times that
    assert added([*differences[:-1], -0.1]) == pytest.approx(1.1e-3, rel=0.03)
    assert added([-2.0e-3] * 16) == 0.0
    assert added([1.0, 2.0]) == 1.5


def test_a_step_is_expected_to_take_its_mean_but_for_the_slowest_twentieth() -> None:
    assert expected([1.0] * 19 + [100.0]) == 1.0
    assert expected([1.0, 3.0]) == 2.0
