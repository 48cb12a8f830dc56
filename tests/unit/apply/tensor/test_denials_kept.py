"""Parts that ran whole while places of draws were found run whole from then on."""

from __future__ import annotations

import pytest
from torch import nn

from meshwright.apply.tensor.guards import part_guard
from meshwright.apply.tensor.guards.part_guard import Guard, denials_kept
from meshwright.apply.tensor.tensor_layout import Region, TensorLayout


def guard_of(model: nn.Module, *, drops: bool) -> Guard:
    """Return a guard that has proven nothing yet, as far as denials need it."""
    guard = object.__new__(Guard)
    region = Region(scope="", num_units=2, cuts={}, roles={}, drops=drops)
    guard._model, guard._layout = model, TensorLayout(regions=(region,), chains=(), whole={})
    guard.num_denied, guard.is_closed = 0, False
    part_guard._all.add(guard)
    return guard


@pytest.mark.parametrize(
    ("drops", "is_own", "is_closed"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_part_that_draws_and_was_denied_is_closed(drops: bool, is_own: bool, is_closed: bool) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    guard, idle = guard_of(model if is_own else other, drops=drops), guard_of(model, drops=True)
    with denials_kept(model):
        guard.num_denied += 1
    assert guard.is_closed is is_closed
    assert not idle.is_closed, "no call of it was denied"
    assert not guard.is_closed or not guard.allows((), {})
