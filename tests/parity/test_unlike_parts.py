"""Parts with modes of their own or parameters in dicts, functions that save results, and proofs that one share alone needs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity.jobs import unlike_parts_jobs as jobs

import meshwright as mw
from meshwright import testing

TOLERANCE = 1e-11


@functools.cache
def _single(name: str) -> Any:
    return jobs.train(name, "single")


def _check(name: str, line: str) -> None:
    wanted = _single(name)
    for found in testing.run_ranks(jobs.train, mw.Plan.parse(line).num_ranks, name, line):
        assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE)
        for key, value in wanted[1].items():
            torch.testing.assert_close(found[1][key], value, rtol=TOLERANCE, atol=TOLERANCE)
        assert not [reason for reason in found[2] if reason.startswith("rng:")]


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=3,whole_below=0", "tp=2", "pp=2"])
def test_dropout_of_a_part_that_its_own_train_would_freeze_is_one_devices(line: str) -> None:
    """The trial of what a model draws called `train`, which froze the body, and found no dropout: each rank drew its own."""
    _check("frozen", line)


def test_a_function_that_saves_its_result_is_one_devices() -> None:
    losses, state, _ = _single("chosen")
    wanted = jobs.plain("chosen")
    assert losses == pytest.approx(wanted[0], rel=TOLERANCE)
    for key, value in wanted[1].items():
        torch.testing.assert_close(state[key], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("line", ["pp=2", "pp=3,micro_batches=2,schedule=zb-h1"])
def test_a_function_between_layers_may_save_its_result(line: str) -> None:
    """Autograd detached the result on stages that have no values of it, which was refused as code that torch does not see."""
    _check("chosen", line)


@pytest.mark.parametrize("line", ["pp=2", "pp=3,micro_batches=2"])
@pytest.mark.parametrize("name", ["likely", "checked", "correlated", "verified", "asserted"])
def test_distributions_of_a_late_layers_results_are_checked_where_they_are(name: str, line: str) -> None:
    """Their checks branch on values, which was refused though they decide nothing."""
    _check(name, line)


@pytest.mark.parametrize("line", ["single", "pp=2"])
@pytest.mark.parametrize("name", ["invalid", "unverified", "refuted"])
def test_a_distribution_that_is_not_valid_is_an_error_under_pipelines_too(name: str, line: str) -> None:
    outcomes = testing.run_outcomes(jobs.train, mw.Plan.parse(line).num_ranks, name, line)
    assert any("to satisfy the constraint" in str(outcome.error) for outcome in outcomes)
    assert all(outcome.error is not None for outcome in outcomes)


@pytest.mark.parametrize("line", ["dp=2,zero=3,whole_below=0", "dp=2,zero=3,whole_below=0,recompute=full"])
def test_parameters_that_a_cell_keeps_in_a_dict_are_there_when_it_runs(line: str) -> None:
    """They read as NaN: only calls of layers, and look-ups by name, gathered them."""
    _check("recurrent", line)


@pytest.mark.parametrize("line", ["tp=2", "dp=2,tp=2", "dp=2,zero=3,whole_below=0"])
def test_parameters_that_layers_keep_in_containers_are_whole_where_a_cut_layer_runs_whole(line: str) -> None:
    """The containers had the parts then, so that the sentinel called right numbers corrupt."""
    _check("held", line)


@pytest.mark.timeout(120)
def test_ranks_that_prove_a_share_of_another_size_hold_nobody() -> None:
    """The rank that proved gathered parameters, for which it waited for one that waited for the other two."""
    _check("nodes", "dp=2,tp=2,zero=3,whole_below=0")
