"""What is refused, and that every rank refuses it: changed models, different models, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import Setting, assert_ranks_agree
from tests.parity.models import small_models as models
from tests.tolerances import FLOAT64
from torch import nn

import meshwright as mw
from meshwright import testing


def _rank() -> int:
    return mw.current_world().rank


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _step_after(change: Callable[[mw.ParallelModel], None], build: Callable[[], nn.Module]) -> list[float]:
    """One step, a change to the model, another step."""
    batch = cases.regression(6, 0)
    model = mw.apply_plan(build, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd)
    try:
        results = [model.step(mw.split_batch(batch, model))]
        change(model)
        results.append(model.step(mw.split_batch(batch, model)))
        return [result.loss for result in results]
    finally:
        model.close()


def _assert_all_raise(outcomes: Sequence[testing.RankOutcome], kind: type[BaseException], *words: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, kind), f"rank {rank}: {outcome.error!r} {outcome.result!r}"
        for word in words:
            assert word in str(outcome.error), f"rank {rank}: '{word}' is not in: {outcome.error}"


# -- E090: changes after the plan was applied ------------------------------------------------------------------------


def _freeze_on_schedule(step: int, module: nn.Module) -> None:
    """Steps 0 and 1: the first layer is frozen; 2 and 3: it is not; 4: it is again."""
    module[0].requires_grad_(step in (2, 3))


def _steps_with_freezing(build: Callable[[], nn.Module], num_ranks: int) -> list[testing.StepRecord]:
    options = testing.StepOptions(num_steps=5, before_step=_freeze_on_schedule)
    plan = mw.Plan.parse(f"dp={num_ranks},micro_batches=2")
    return testing.plan_steps(build, plan, cases.CASES["mlp"].batches(7), losses.square, options=options)


def test_freezing_and_unfreezing_between_steps() -> None:
    per_rank = testing.run_ranks(_steps_with_freezing, 2, models.build_mlp, 2)
    expected = testing.oracle_steps(
        models.build_mlp,
        cases.CASES["mlp"].batches(7),
        losses.square,
        num_steps=5,
        before_step=_freeze_on_schedule,
    )
    assert [record.gradients["0.weight"] is None for record in expected] == [True, True, False, False, True]
    testing.assert_parity(per_rank[0], expected, FLOAT64)
    assert_ranks_agree(per_rank)


def _toggle_on_rank_0(model: mw.ParallelModel) -> None:
    if _rank() == 0:
        model.module[0].weight.requires_grad_(False)


def _replace_parameter(model: mw.ParallelModel) -> None:
    model.module[0].weight = nn.Parameter(model.module[0].weight.detach().clone())


def _replace_on_rank_1(model: mw.ParallelModel) -> None:
    if _rank() == 1:
        _replace_parameter(model)


def _add_module(model: mw.ParallelModel) -> None:
    model.module.append(nn.Linear(5, 5).double())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_toggle_on_rank_0, "0.weight"),
        (_replace_parameter, "0.weight"),
        (_replace_on_rank_1, "0.weight"),
        (_add_module, "3 children"),
    ],
)
def test_changes_that_would_go_unnoticed_are_refused_on_every_rank(change: Any, word: str) -> None:
    outcomes = testing.run_outcomes(_step_after, 2, change, models.build_mlp)
    _assert_all_raise(outcomes, mw.ApplyError, word)


def _no_change(model: mw.ParallelModel) -> None:
    del model


def test_no_change_is_not_refused() -> None:
    outcomes = testing.run_outcomes(_step_after, 2, _no_change, models.build_mlp)
    assert [outcome.error for outcome in outcomes] == [None, None]


def _take_away(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _build_that_takes_gradients_away() -> nn.Module:
    """As people do who run an optimizer inside backward."""
    model = models.build_mlp()
    model[0].weight.register_post_accumulate_grad_hook(_take_away)
    return model


def _steps_without_gradients() -> list[testing.StepRecord]:
    batches = cases.CASES["mlp"].batches(6)
    return testing.plan_steps(_build_that_takes_gradients_away, mw.Plan.parse("dp=2"), batches, losses.square)


def test_gradients_that_a_hook_takes_away_are_none_or_refused() -> None:
    outcomes = testing.run_outcomes(_steps_without_gradients, 2)
    if any(outcome.error is not None for outcome in outcomes):
        _assert_all_raise(outcomes, mw.ApplyError, "0.weight")
        return
    batches = cases.CASES["mlp"].batches(6)
    expected = testing.oracle_steps(_build_that_takes_gradients_away, batches, losses.square)
    assert expected[0].gradients["0.weight"] is None
    testing.assert_parity(outcomes[0].result, expected, FLOAT64)


# -- E089: ranks that disagree ---------------------------------------------------------------------------------------


def _build_extra_layer() -> nn.Module:
    return nn.Sequential(*models.build_mlp(), *([nn.Linear(5, 5).double()] if _rank() == 1 else []))


def _build_other_size() -> nn.Module:
    hidden = 13 + _rank()
    return nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 5)).double()


def _build_other_order() -> nn.Module:
    model = nn.Module()
    for name in ("a", "b") if _rank() == 0 else ("b", "a"):
        model.add_module(name, nn.Linear(7, 5).double())
    return model


def _build_one_frozen() -> nn.Module:
    model = models.build_mlp()
    if _rank() == 1:
        model[2].bias.requires_grad_(False)
    return model


def _build_other_dtype() -> nn.Module:
    model = models.build_mlp()
    if _rank() == 1:
        model[2].float()
    return model


def _build_tied_on_one() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)).double()
    if _rank() == 1:
        model[1].weight = model[0].weight
    return model


def _apply(build: Callable[[], nn.Module], plans: Sequence[str]) -> int:
    model = mw.apply_plan(build, mw.Plan.parse(plans[_rank()]), loss_fn=losses.square, optimizer=_sgd)
    try:
        with testing.count_collectives(model) as counts:
            model.step(mw.split_batch(cases.regression(6, 0), model))
        return counts.calls()
    finally:
        model.close()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_build_extra_layer, ["3.weight"]),
        (_build_other_size, ["0.weight", "13", "14"]),
        (_build_other_order, ["a.weight", "b.weight"]),
        (_build_one_frozen, ["2.bias"]),
        (_build_other_dtype, ["2.weight", "float32", "float64"]),
        (_build_tied_on_one, ["1.weight"]),
    ],
)
def test_different_models_are_refused_on_every_rank(build: Any, words: list[str]) -> None:
    outcomes = testing.run_outcomes(_apply, 2, build, ["dp=2", "dp=2"])
    _assert_all_raise(outcomes, mw.ApplyError, *words)


def test_different_plans_are_refused_on_every_rank() -> None:
    outcomes = testing.run_outcomes(_apply, 2, models.build_mlp, ["dp=2", "dp=2,micro_batches=3"])
    _assert_all_raise(outcomes, mw.ApplyError, "micro_batches")


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    outcomes = testing.run_outcomes(_apply, 2, models.build_mlp, ["dp=3", "dp=3"])
    _assert_all_raise(outcomes, mw.MeshwrightError, "3", "2")


def _build_seeded_by_rank() -> nn.Module:
    torch.manual_seed(_rank())
    return models.build_mlp()


def _first_values(build: Callable[[], nn.Module]) -> torch.Tensor:
    model = mw.apply_plan(build, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd)
    try:
        return model.module[0].weight.detach().clone()
    finally:
        model.close()


def test_every_rank_starts_from_rank_0s_values() -> None:
    first, second = testing.run_ranks(_first_values, 2, _build_seeded_by_rank)
    torch.manual_seed(0)
    assert torch.equal(first, second)
    assert torch.equal(first, models.build_mlp()[0].weight)


# -- what users rely on ----------------------------------------------------------------------------------------------


def _names(build: Callable[[], nn.Module]) -> list[str]:
    model = mw.apply_plan(build, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd)
    try:
        state = model.full_state_dict()
        plain = build()
        plain.load_state_dict(state)
        assert all(tensor.device.type == "cpu" for tensor in state.values())
        return list(state)
    finally:
        model.close()


class _OddNames(nn.Module):
    """A model whose own submodules bear the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(7, 7)
        self._orig_mod = nn.Sequential(nn.Linear(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


def _build_odd_names() -> nn.Module:
    return _OddNames().double()


def _build_tied() -> nn.Module:
    return models.Tied().double()


@pytest.mark.parametrize(
    "build",
    [models.build_gpt, _build_tied, models.build_parametrized, _build_odd_names, models.build_resnet_batch_norm],
)
def test_names_are_those_of_the_plain_model_in_its_order(build: Any) -> None:
    # E021; a tied weight stands there under both names, as in the plain model's state_dict.
    torch.manual_seed(0)
    expected = list(build().state_dict())
    assert testing.run_ranks(_names, 2, build) == [expected] * 2


def _attributes() -> tuple[Any, ...]:
    setting = Setting(num_samples=4)
    model = mw.apply_plan(models.build_hooked, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd)
    try:
        for batch in cases.CASES["hooked"].batches(setting.num_samples):
            model.step(mw.split_batch(batch, model))
        module = model.module
        return (
            module[0].bias.requires_grad,
            module[0].bias.grad,
            module[0].weight.tag,
            module[2].weight.num_calls,
            type(module[2].bias).__name__,
        )
    finally:
        model.close()


def test_attributes_hooks_and_subclasses_are_kept() -> None:
    # E091; the hook that counts sees one accumulation for each of the 3 steps' single micro-batch.
    assert testing.run_ranks(_attributes, 2) == [(False, None, "no_decay", 3, "TaggedParameter")] * 2
