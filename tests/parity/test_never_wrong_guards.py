"""What a first batch did not show, and comes later under tensor parallelism: equal to one device, whichever way it is run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from tests.parity.jobs import guard_jobs as jobs
from tests.parity.jobs.guard_jobs import change, evaluate, step
from tests.tolerances import FLOAT64
from torch import nn

import meshwright as mw
from meshwright import testing


def _freeze(module: nn.Module, *, wanted: bool) -> None:
    for name, parameter in module.named_parameters():
        if "ln" in name or "emb" in name:
            parameter.requires_grad_(wanted)


def _freeze_norms(module: nn.Module) -> None:
    _freeze(module, wanted=False)


def _unfreeze_norms(module: nn.Module) -> None:
    _freeze(module, wanted=True)


def _set_temperature(module: nn.Module) -> None:
    for layer in module.layers:
        layer.mlp.temperature = 0.5


def _reset_temperature(module: nn.Module) -> None:
    for layer in module.layers:
        layer.mlp.temperature = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a script."""

    kind: str
    script: tuple[jobs.Action, ...]
    loss: str = "plain"
    whole: bool = False
    """Whether some call has to run whole, and the plan says so."""
    num_layers: int = 2
    """Layers [count]."""


CASES = {
    "another mode": Case("mode", (step(), evaluate(), step(seed=1), evaluate())),
    "evaluation first": Case("mode", (evaluate(), step(), evaluate())),
    "another argument": Case("argument", (step(), step(seed=1, last=True), step(seed=2)), whole=True),
    "a longer batch": Case("length", (step(length=4), step(length=12, seed=1), step(length=6, seed=2))),
    "a longer stream": Case("stream length", (step(length=4), step(length=12, seed=1), step(length=7)), whole=True),
    "more samples": Case("samples", (step(num_samples=1), step(num_samples=4, seed=1), step(num_samples=2))),
    "an attribute": Case(
        "", (step(), change(_set_temperature), step(seed=1), change(_reset_temperature), step()), whole=True
    ),
    "a layer left out": Case(
        "", (step(), step(seed=1, skip=1), step(seed=2, skip=0), step(seed=3, skip=2), evaluate(skip=1)), num_layers=3
    ),
    "fewer layers": Case("", (step(), step(seed=1, depth=1), step(seed=2, depth=2), step(seed=3)), num_layers=3),
    "hidden states collected": Case("", (step(), step(seed=1, collect=True), evaluate(collect=True))),
    "frozen at first": Case("", (change(_freeze_norms), step(), step(seed=1), change(_unfreeze_norms), step(seed=2))),
    "logits written over": Case("setitem", (step(), evaluate())),
    "logits divided": Case("", (step(), step(seed=1)), loss="scaled"),
    "views of logits written over": Case("", (step(), step(seed=1)), loss="filled"),
}


OTHER_PLANS = {"recompute": "tp=2,recompute=full", "zero": "dp=2,tp=2,zero=2"}
WITH_OTHER_PLANS = (
    "another argument",
    "a longer stream",
    "a layer left out",
    "frozen at first",
    "views of logits written over",
)


def _cells() -> list[Any]:
    cells = [pytest.param(name, "tp=2", id=f"{name}-tp") for name in CASES]
    others = [(name, kind) for name in WITH_OTHER_PLANS for kind in OTHER_PLANS]
    return cells + [pytest.param(name, OTHER_PLANS[kind], id=f"{name}-{kind}") for name, kind in others]


@pytest.mark.parametrize(("name", "plan"), _cells())
def test_equals_one_process(name: str, plan: str) -> None:
    case = CASES[name]
    num_ranks = 4 if "dp" in plan else 2
    job = functools.partial(jobs.run_script, num_layers=case.num_layers)
    per_rank = testing.run_ranks(job, num_ranks, case.kind, list(case.script), plan, case.loss)
    expected = jobs.run_plain(case.kind, list(case.script), case.loss, num_layers=case.num_layers)
    for seen, reasons in per_rank:
        for place, ((loss, tensors), (wanted, reference)) in enumerate(zip(seen, expected, strict=True)):
            assert loss == pytest.approx(wanted, rel=FLOAT64), f"action {place}"
            testing.assert_parity(tensors, reference, FLOAT64)
        if case.whole:
            assert any("runs whole for calls that are not proven" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("build", "plan", "words"),
    [
        (jobs.build_scripted, "dp=2", "is compiled by torch.jit"),
        (jobs.build_scripted, "dp=2,zero=3", "is compiled by torch.jit"),
        (jobs.build_lazy, "dp=2", "has no shape before the first forward"),
        (jobs.build_locked, "tp=2", "copy.deepcopy failed"),
    ],
)
def test_models_that_cannot_be_followed_are_refused_with_a_fix(build: Any, plan: str, words: str) -> None:
    for outcome in testing.run_outcomes(jobs.step_of, 2, build, plan):
        assert isinstance(outcome.error, mw.ApplyError), outcome.traceback_text
        assert words in outcome.error.message
        assert outcome.error.fix


def test_a_model_without_shapes_is_refused_on_one_device() -> None:
    with pytest.raises(mw.ApplyError, match="has no shape before the first forward"):
        jobs.step_of(jobs.build_lazy, "single,micro_batches=2")
