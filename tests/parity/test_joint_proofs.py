"""Pairs that one experiment proves train to one process's numbers, with dropout and batches of other sizes."""

from __future__ import annotations

import functools

import pytest
from tests.parity.jobs.joint_proof_jobs import MIXING, NUM_PAIRS, train
from tests.parity.jobs.stored_jobs import Trained
from tests.tolerances import FLOAT64

from meshwright import testing


@functools.cache
def single() -> Trained:
    return train("single")[0]


def test_pairs_proven_in_one_experiment_train_as_one_process_does() -> None:
    wanted = single()
    found = testing.run_ranks(train, 2, "tp=2")
    for (losses, values, layouts, reasons), _ in found:
        assert losses == pytest.approx(wanted[0], rel=FLOAT64)
        testing.assert_parity({**wanted[1], **values}, wanted[1], FLOAT64)
        assert not [reason for reason in reasons if reason.startswith("rng")]
        pairs = [place for place in range(NUM_PAIRS) if place != MIXING]
        assert all(layouts[f"up.{place}.weight"] == "column" for place in pairs)
        assert all(layouts[f"down.{place}.weight"] == "row" for place in pairs)
    counts = [own for _, own in found if own]
    assert counts == [[6, 3, 2, 3]]  # all; the half with the wrong one, and its half; the other half
