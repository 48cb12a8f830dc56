"""Weights kept in parts and put together for each use: one process's numbers, with dropout and batches of other sizes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tests.parity.jobs.stored_jobs import Trained, go_on, train
from tests.parity.models.stored_models import BLOCKS
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing


@functools.cache
def single(name: str) -> Trained:
    return train(name, "single")


def check(found: Trained, name: str) -> None:
    wanted = single(name)
    assert found[0] == pytest.approx(wanted[0], rel=FLOAT64)
    testing.assert_parity(found[1], wanted[1], FLOAT64)
    assert not [reason for reason in found[3] if reason.startswith("rng")]


@pytest.mark.parametrize("name", BLOCKS)
def test_two_ranks(name: str) -> None:
    for found in testing.run_ranks(train, 2, name, "tp=2"):
        check(found, name)
        assert "stored" in found[2].values()
        assert any(reason.startswith("kept in parts, and put together for each use") for reason in found[3])
        assert not any("runs whole for calls" in reason for reason in found[3] if "stored" in reason)


@pytest.mark.parametrize(
    ("name", "line"),
    [("recurrent", "tp=2,recompute=full"), ("hooked", "tp=2,micro_batches=2"), ("cosines", "tp=2,recompute=full")],
)
def test_two_ranks_that_repeat_forwards(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 2, name, line):
        check(found, name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("recurrent", "dp=2,tp=2,zero=3,whole_below=0"),
        ("experts", "tp=2,pp=2,micro_batches=2"),
        ("cosines", "tp=4"),
        ("parametrised", "dp=2,tp=2,zero=3,whole_below=0"),
    ],
)
def test_four_ranks(name: str, line: str) -> None:
    for found in testing.run_ranks(train, 4, name, line):
        check((found[0], {**single(name)[1], **found[1]}, *found[2:]), name)


@pytest.mark.parametrize("name", ["recurrent", "experts"])
def test_a_run_goes_on_under_other_plans(name: str, tmp_path: Path) -> None:
    wanted = go_on(name, "single", str(tmp_path / "whole"), first=0, steps=6)
    for place, line in enumerate(("tp=2", "dp=2,zero=1", "tp=2")):
        job = functools.partial(go_on, name, line, str(tmp_path / "parts"), first=2 * place, steps=2)
        for losses in testing.run_ranks(job, mw.Plan.parse(line).num_ranks):
            assert losses == pytest.approx(wanted[2 * place : 2 * place + 2], rel=FLOAT64)
