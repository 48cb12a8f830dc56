"""Code that looks at the classes of modules, which most plans replace by subclasses: equal to one device, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.parity.jobs import class_jobs as jobs

import meshwright as mw
from meshwright import testing

ONE_PROCESS = ["single,recompute=full", "single,recompute=selective", "data_parallel,dp=2"]
RANKS = ["tp=2", "pp=2,micro_batches=2", "dp=2,zero=3,recompute=full", "tp=2,recompute=full"]


def _losses(build: Any, line: str, **options: Any) -> list[float]:
    if line in ONE_PROCESS or line == "single":
        return jobs.steps(build, line, **options)
    return testing.run_ranks(functools.partial(jobs.steps, **options), 2, build, line)[0]


@pytest.mark.parametrize("kind", jobs.KINDS)
@pytest.mark.parametrize("line", [*ONE_PROCESS, *RANKS])
def test_classes_are_equal_to_the_users(line: str, kind: str) -> None:
    build = functools.partial(jobs.Asking, kind)
    assert _losses(build, line) == pytest.approx(_losses(build, "single"), rel=1e-11)


@pytest.mark.parametrize("line", [*ONE_PROCESS, *RANKS])
def test_code_that_asks_by_identity_is_refused(line: str) -> None:
    with pytest.raises(mw.ApplyError, match=r"'Exact._scale' .*class_jobs.py:\d+\) asks by `is`"):
        _losses(functools.partial(jobs.Exact, ""), line)


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=2"])
def test_plans_that_replace_no_class_allow_it(line: str) -> None:
    build = functools.partial(jobs.Exact, "")
    assert _losses(build, line) == pytest.approx(_losses(build, "single"), rel=1e-11)


@pytest.mark.parametrize("line", ["single,recompute=full", "data_parallel,dp=2", "pp=2,micro_batches=2", "dp=2"])
def test_a_forward_that_a_class_gets_later_runs(line: str) -> None:
    build = functools.partial(jobs.Asking, "table")
    assert _losses(build, line, replaces=True) == pytest.approx(_losses(build, "single", replaces=True), rel=1e-11)


def test_a_forward_that_a_class_gets_after_its_layers_were_cut_is_refused() -> None:
    with pytest.raises(mw.ApplyError, match="the forward of class 'Block' was replaced after the plan was applied"):
        _losses(functools.partial(jobs.Asking, "table"), "tp=2", replaces=True)
