"""Cases from real life that are not about numbers alone: outputs, optimizers, schedulers, random masks, evaluation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import Setting, assert_ranks_agree, cut, options_of, reference
from tests.parity.models import containers
from tests.parity.models import small_models as models
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _rank() -> int:
    return mw.current_world().rank


# -- E045: containers ------------------------------------------------------------------------------------------------


def _output(kind: str, line: str, devices: Any) -> Any:
    inputs, _ = cases.regression(6, 0)
    build = functools.partial(containers.WithOutput, kind)
    with mw.apply_plan(build().double(), mw.Plan.parse(line), loss_fn=losses.of_container, devices=devices) as model:
        return model(inputs)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "attributes", "namedtuple", "nested"])
@pytest.mark.parametrize("line", ["mode=data_parallel,dp=2", "mode=model_parallel,pp=2"])
def test_outputs_keep_their_type_and_fields(kind: str, line: str) -> None:
    torch.manual_seed(0)
    got = _output(kind, line, ["cpu", "cpu"])
    torch.manual_seed(0)
    expected = containers.WithOutput(kind).double()(cases.regression(6, 0)[0])
    assert type(got) is type(expected)
    leaves, spec = torch.utils._pytree.tree_flatten(_plain(got))
    others, other_spec = torch.utils._pytree.tree_flatten(_plain(expected))
    assert spec == other_spec
    for leaf, other in zip(leaves, others, strict=True):
        assert (leaf is None and other is None) or torch.allclose(leaf, other, rtol=0, atol=1e-12)


def _plain(output: Any) -> Any:
    if isinstance(output, containers.AttributeOutput):
        return dict(output)
    return vars(output) if isinstance(output, containers.DataclassOutput) else output


# -- E012, E016, E036: optimizers ------------------------------------------------------------------------------------


def _with_given_optimizer(of_this_model: bool) -> list[Any]:
    torch.manual_seed(0)
    module = models.build_mlp()
    other = module if of_this_model else models.build_mlp()
    groups = [
        {"params": other[0].parameters(), "lr": 0.1, "weight_decay": 0.2, "tag": "first"},
        {"params": other[2].parameters(), "lr": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with mw.apply_plan(module, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=optimizer) as model:
        for batch in cases.CASES["mlp"].batches(6):
            model.step(mw.split_batch(batch, model))
        groups_seen = [
            {k: v for k, v in g.items() if k in ("lr", "weight_decay", "tag")} for g in optimizer.param_groups
        ]
        return [groups_seen, {name: p.detach().clone() for name, p in module.named_parameters()}]


def test_an_optimizer_that_was_built_before_is_used_with_its_groups() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first = list(parameters)
        groups = [{"params": first[:2], "lr": 0.1, "weight_decay": 0.2}, {"params": first[2:], "lr": 0.01}]
        return torch.optim.SGD(groups, lr=1.0)

    expected = testing.oracle_steps(models.build_mlp, cases.CASES["mlp"].batches(6), losses.square, optimizer=grouped)
    for groups, values in testing.run_ranks(_with_given_optimizer, 2, True):
        assert groups == [
            {"lr": 0.1, "weight_decay": 0.2, "tag": "first"},
            {"lr": 0.01, "weight_decay": 0},
        ]
        testing.assert_parity(values, expected[-1].parameters, FLOAT64)


def test_an_optimizer_of_another_model_is_refused() -> None:
    for outcome in testing.run_outcomes(_with_given_optimizer, 2, False):
        assert isinstance(outcome.error, mw.ApplyError)
        assert "4 of the optimizer's 4 parameters do not belong to this model" in str(outcome.error)
        assert "parameters of a loss belong into the module" in str(outcome.error)


def _optimizer_state(build: Any) -> tuple[list[str], int]:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    with mw.apply_plan(build, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=adamw) as model:
        model.step(mw.split_batch(cases.regression(6, 0), model))
        names = {id(p): name for name, p in model.module.named_parameters()}
        state = model.optimizer.state
        return sorted(names[id(p)] for p in state), sum(t.numel() for s in state.values() for t in s.values())


def test_frozen_parameters_have_no_optimizer_state() -> None:
    model = models.build_lora()
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    for names, num_elements in testing.run_ranks(_optimizer_state, 2, models.build_lora):
        assert names == sorted(trainable)
        assert num_elements == 2 * sum(trainable.values()) + len(trainable)  # two moments and a step count


def _gradients_only(line: str, devices: Any = None) -> tuple[dict[str, Tensor | None], bool]:
    case = cases.CASES["branches"]
    with mw.apply_plan(case.build, mw.Plan.parse(line), loss_fn=case.loss_fn, devices=devices) as model:
        before = model.full_state_dict()
        model.step(mw.split_batch(case.batch(7, 0), model))
        model.step(mw.split_batch(case.batch(7, 1), model))
        unchanged = all(torch.equal(before[name], t) for name, t in model.full_state_dict().items())
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, unchanged


def test_without_an_optimizer_gradients_are_there_to_read() -> None:
    case = cases.CASES["branches"]
    expected = testing.oracle_steps(case.build, [case.batch(7, 1)], case.loss_fn)[0]
    results = [
        *testing.run_ranks(_gradients_only, 3, "dp=3,micro_batches=2"),
        _gradients_only("single"),
        _gradients_only("mode=data_parallel,dp=2", ["cpu", "cpu"]),
        _gradients_only("mode=model_parallel,pp=2", ["cpu", "cpu"]),
    ]
    for gradients, unchanged in results:
        assert unchanged
        testing.assert_parity(gradients, expected.gradients, FLOAT64)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_optimizers_that_treat_many_tensors_at_once(foreach: bool, fused: bool) -> None:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=foreach and not fused, fused=fused)
    per_rank = testing.run_ranks(_train_tiny, 2, adamw)
    expected = testing.oracle_steps(
        cases.CASES["tiny"].build, cases.CASES["tiny"].batches(7), losses.square, optimizer=adamw
    )
    testing.assert_parity(per_rank[0], expected, 1e-9)  # AdamW divides roundings by the size of small gradients
    assert_ranks_agree(per_rank)


def _train_tiny(optimizer: Any) -> list[testing.StepRecord]:
    case = cases.CASES["tiny"]
    options = testing.StepOptions(optimizer=optimizer)
    return testing.plan_steps(case.build, mw.Plan.parse("dp=2"), case.batches(7), case.loss_fn, options=options)


# -- E013: schedulers ------------------------------------------------------------------------------------------------


def _learning_rates(line: str) -> list[float]:
    with mw.apply_plan(models.build_mlp, mw.Plan.parse(line), loss_fn=losses.square, optimizer=_sgd) as model:
        scheduler = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda step: step + 1)
        seen = []
        for step in range(6):
            seen.append(model.optimizer.param_groups[0]["lr"])
            model.step(mw.split_batch(cases.regression(7, step), model))
            scheduler.step()
        return seen


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_scheduler_advances_once_a_step(num_ranks: int) -> None:
    expected = [0.1 * (step + 1) for step in range(6)]
    for rates in testing.run_ranks(_learning_rates, num_ranks, f"dp={num_ranks},micro_batches=3"):
        assert rates == pytest.approx(expected, rel=1e-12)


# -- E054: random numbers --------------------------------------------------------------------------------------------


class _Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5, training=self.training)
        self.masks.append(mask.detach())
        return x * mask * self.weight


def _masks(seed: int) -> list[Tensor]:
    build = functools.partial(_cast, _Mask)
    with mw.apply_plan(build, mw.Plan.parse("dp=2"), loss_fn=_sum_loss, optimizer=_sgd, seed=seed) as model:
        for _ in range(2):
            model.step((torch.ones(4, 33, dtype=torch.float64), None))
        return model.module.masks


def _cast(build: Any) -> nn.Module:
    return build().double()


def _sum_loss(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.mean()


def test_ranks_draw_different_masks_and_the_same_ones_again() -> None:
    first, second = testing.run_ranks(_masks, 2, 7)
    again, _ = testing.run_ranks(_masks, 2, 7)
    other, _ = testing.run_ranks(_masks, 2, 8)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


# -- E052: evaluation ------------------------------------------------------------------------------------------------


def _evaluate(line: str, batch_size: int, devices: Any = None) -> tuple[float, int, list[Any]]:
    inputs, targets = cases.regression(7, 0)
    with mw.apply_plan(
        models.build_mlp, mw.Plan.parse(line), loss_fn=losses.square, optimizer=_sgd, devices=devices
    ) as model:
        before = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
        total, count = 0.0, 0
        for start in range(0, 7, batch_size):
            batch = (inputs[start : start + batch_size], targets[start : start + batch_size])
            result = model.evaluate(mw.split_batch(batch, model))
            total += result["loss"] * result["num_samples"]
            count += result["num_samples"]
        unchanged = all(torch.equal(before[name], t) for name, t in model.full_state_dict().items())
        return total / count, count, [unchanged, model.module.training, [p.grad for p in model.parameters()]]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_evaluation_counts_every_sample_once(num_ranks: int, batch_size: int) -> None:
    torch.manual_seed(0)
    model = models.build_mlp()
    inputs, targets = cases.regression(7, 0)
    expected = float((model(inputs) - targets).square().mean().detach())
    for loss, count, state in testing.run_ranks(_evaluate, num_ranks, f"dp={num_ranks}", batch_size):
        assert loss == pytest.approx(expected, rel=FLOAT64)
        assert count == 7
        assert state == [True, True, [None] * 4]


@pytest.mark.parametrize("line", ["single", "mode=data_parallel,dp=2", "mode=model_parallel,pp=2"])
def test_evaluation_in_one_process(line: str) -> None:
    loss, count, state = _evaluate(line, 3, None if line == "single" else ["cpu", "cpu"])
    plain, *_ = _evaluate("single", 7)
    assert loss == pytest.approx(plain, rel=FLOAT64)
    assert (count, state[:2]) == (7, [True, True])


def _build_with_modes() -> nn.Module:
    """Dropout and batch statistics: what evaluation computes depends on the mode."""
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 5)).double()


def _evaluate_between_steps(line: str, devices: Any = None) -> tuple[float, list[bool], dict[str, Tensor]]:
    first, second, third = cases.CASES["mlp"].batches(8)
    with mw.apply_plan(
        _build_with_modes, mw.Plan.parse(line), loss_fn=losses.square, optimizer=_sgd, devices=devices
    ) as model:
        model.step(mw.split_batch(first, model))
        model.module[1].eval()  # the user's own choice for one layer outlives an evaluation
        before, random_state = model.full_state_dict(), torch.get_rng_state()
        loss = model.evaluate(mw.split_batch(second, model))["loss"]
        assert model.evaluate(mw.split_batch(second, model))["loss"] == loss
        testing.assert_parity(model.full_state_dict(), before, 0.0)
        assert torch.equal(torch.get_rng_state(), random_state)
        modes = [module.training for module in model.module.modules()]
        model.step(mw.split_batch(third, model))
        return loss, modes, before


@pytest.mark.parametrize("line", ["dp=2", "single", "mode=data_parallel,dp=2", "mode=model_parallel,pp=2"])
def test_evaluation_is_in_eval_mode_and_leaves_no_trace(line: str) -> None:
    devices = ["cpu", "cpu"] if "mode" in line else None
    results = (
        testing.run_ranks(_evaluate_between_steps, 2, line)
        if line == "dp=2"
        else [_evaluate_between_steps(line, devices)]
    )
    for loss, modes, state in results:
        plain = _build_with_modes().eval()
        plain.load_state_dict(state)
        inputs, targets = cases.CASES["mlp"].batches(8)[1]
        assert loss == pytest.approx(float((plain(inputs) - targets).square().mean().detach()), rel=FLOAT64)
        assert modes == [True, True, False, True, True]


# -- E011, E092: what ranks hold -------------------------------------------------------------------------------------


def _state_on_rank_0_only() -> int:
    with mw.apply_plan(models.build_gpt, mw.Plan.parse("dp=2"), loss_fn=losses.cross_entropy, optimizer=_sgd) as model:
        model.step(mw.split_batch(cases.language(4, 0), model))
        held = len(model.full_state_dict()) if _rank() == 0 else 0
        text = repr(model.module) if _rank() == 0 else ""
        model.step(mw.split_batch(cases.language(4, 1), model))
        return held + len(text)


def test_rank_0_may_look_at_the_state_alone() -> None:
    first, second = testing.run_ranks(_state_on_rank_0_only, 2)
    assert first > 100
    assert second == 0


def _ten_steps(num_ranks: int) -> list[testing.StepRecord]:
    case, setting = cases.CASES["tiny"], Setting(num_steps=10)
    options = options_of(case, setting)
    plan = mw.Plan.parse(f"dp={num_ranks},micro_batches=2")
    return testing.plan_steps(case.build, plan, case.batches(7, 10), case.loss_fn, options=options)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_copies_stay_equal_bit_by_bit(num_ranks: int) -> None:
    per_rank = testing.run_ranks(_ten_steps, num_ranks, num_ranks)
    assert_ranks_agree(per_rank)
    testing.assert_parity(per_rank[0][0], reference("tiny", Setting(num_steps=1))[0], FLOAT64)


# -- E066: gradients of inputs ---------------------------------------------------------------------------------------


def _input_gradients() -> Tensor:
    inputs, targets = cases.regression(6, 0)
    inputs, targets = cut((inputs, targets), [4, 2])[_rank()]
    inputs.requires_grad_()
    with mw.apply_plan(
        cases.CASES["in_place"].build, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd
    ) as model:
        model.step((inputs, targets))
    return inputs.grad


def test_gradients_of_inputs_arrive() -> None:
    torch.manual_seed(0)
    model = cases.CASES["in_place"].build()
    inputs, targets = cases.regression(6, 0)
    inputs.requires_grad_()
    losses.square(model(inputs), (inputs, targets)).backward()
    parts = testing.run_ranks(_input_gradients, 2)
    testing.assert_parity({"inputs": torch.cat(parts)}, {"inputs": inputs.grad}, FLOAT64)


# -- E101: models that other tools have wrapped ----------------------------------------------------------------------


def _meta() -> nn.Module:
    model = models.build_mlp()
    model[2].to("meta")
    return model


def _wrapped() -> nn.Module:
    return nn.DataParallel(models.build_mlp())


@pytest.mark.parametrize(("build", "word"), [(_meta, "2.weight"), (_wrapped, "DataParallel")])
def test_models_of_other_tools_are_refused_and_left_alone(build: Any, word: str) -> None:
    model = build()
    before = [(name, id(p), p.device, len(p._backward_hooks or {})) for name, p in model.named_parameters()]
    with pytest.raises(mw.ApplyError, match=word):
        mw.apply_plan(model, mw.Plan.parse("single"), loss_fn=losses.square, optimizer=_sgd)
    assert before == [(name, id(p), p.device, len(p._backward_hooks or {})) for name, p in model.named_parameters()]


# -- E100: compiled models -------------------------------------------------------------------------------------------


def _build_compiled() -> nn.Module:
    return torch.compile(models.build_mlp(), backend="eager")


def _compiled_steps() -> tuple[list[testing.StepRecord], list[str]]:
    batches = cases.CASES["mlp"].batches(6)
    records = testing.plan_steps(_build_compiled, mw.Plan.parse("dp=2"), batches, losses.square)
    with mw.apply_plan(_build_compiled, mw.Plan.parse("dp=2"), loss_fn=losses.square, optimizer=_sgd) as model:
        return records, list(model.full_state_dict())


@pytest.mark.slow
def test_a_compiled_model_is_equal_and_keeps_its_names() -> None:
    expected = testing.oracle_steps(models.build_mlp, cases.CASES["mlp"].batches(6), losses.square)
    for records, names in testing.run_ranks(_compiled_steps, 2):
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        renamed = {name.removeprefix("_orig_mod."): g for name, g in records[-1].gradients.items()}
        testing.assert_parity(renamed, expected[-1].gradients, FLOAT64)
