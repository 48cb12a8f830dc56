"""Tensor parallelism, where code decides by what a proof did not see: equal to one device, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.parity.jobs import unseen_jobs as jobs
from tests.tolerances import FLOAT64

from meshwright import testing
from meshwright.errors import ApplyError

REFUSED = {
    "data written late": "the .data of a tensor that lies in slices was written into",
    "odd buffer": r"a tensor of shape \[13\] was assigned to the buffer 'layers.0.scale'",
    "written buffer": r"copy_\(\) .* of buffer 'layers.0.scale' needs the whole tensor",
    "inner calls": "a Linear of 'layers.0' was called outside of the module with which it was cut",
    "own calls": "a Linear of 'layers.0' was called outside of the module with which it was cut",
}
RUNS_WHOLE = {
    *(f"sizes {choose.__name__}" for choose in jobs.SIZES),
    "autocast",
    "gradients",
    "hook of all modules",
    "function mode",
    "counting buffer",
    "flag in an attribute",
    "backward hooks",
}
WITH_RECOMPUTE = ("late hooks", "skipped layers", "sizes by_range", "new buffer")


def _assert_equal(seen: jobs.Seen, expected: jobs.Seen) -> None:
    for place, ((loss, tensors), (wanted, reference)) in enumerate(zip(seen, expected, strict=True)):
        assert loss == pytest.approx(wanted, rel=FLOAT64), f"action {place}"
        testing.assert_parity(tensors, reference, FLOAT64)


def _cells() -> list[Any]:
    names = [name for name in jobs.SCRIPTS if name not in REFUSED]
    cells = [pytest.param(name, "tp=2", id=f"{name}-tp") for name in names]
    return cells + [pytest.param(name, "tp=2,recompute=full", id=f"{name}-recompute") for name in WITH_RECOMPUTE]


@pytest.mark.parametrize(("name", "plan"), _cells())
def test_equals_one_process(name: str, plan: str) -> None:
    expected = jobs.run_plain(name)
    for seen, reasons in testing.run_ranks(jobs.run_plan, 2, name, plan):
        _assert_equal(seen, expected)
        assert any("runs whole for calls" in reason for reason in reasons) == (name in RUNS_WHOLE), reasons


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name: str) -> None:
    for outcome in testing.run_outcomes(jobs.run_plan, 2, name, "tp=2"):
        assert isinstance(outcome.error, ApplyError), outcome
        with pytest.raises(ApplyError, match=REFUSED[name]):
            raise outcome.error


def test_one_rank_proves_for_all_where_they_hold_the_same() -> None:
    (made, first), (made_on_other, other) = testing.run_ranks(
        functools.partial(jobs.count_own_proofs, are_alike=True), 2
    )
    assert made == made_on_other == first > 0
    assert other == 0
    # The control: where something differs, each rank proves for itself.
    for made, own in testing.run_ranks(functools.partial(jobs.count_own_proofs, are_alike=False), 2):
        assert own > 0
        assert made >= own


def test_what_alternates_is_proven_once() -> None:
    """Two lengths, arguments and modes, of which the search has seen the first."""
    for counts in testing.run_ranks(jobs.count_proofs, 2, 3):
        assert counts[0] > 0
        assert counts == [counts[0]] * 3
