"""train/optim.py and losses.py: parameter groups by name, the learning rate of each step, losses with weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import ConfigError
from meshwright.spec.plan import Plan
from meshwright.train.config.types import ParamGroup, ScheduleConfig, TrainConfig
from meshwright.train.losses import cross_entropy, mean_squared_error
from meshwright.train.optim import LRSchedule, OptimizerFactory, assign_groups, lr_fraction


def make_config(optimizer, schedule=None, steps=6):
    return TrainConfig.model_validate(
        {
            "model": {"target": "m:build"},
            "data": {"source": "digits"},
            "optimizer": optimizer,
            "schedule": schedule or {},
            "train": {"steps": steps, "global_batch_size": 1},
            "base_directory": "/",
            "plan": Plan(),
        }
    )


def model():
    return nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def test_rules_by_name_set_each_parameters_options():
    groups = [{"patterns": ["*.bias", "1.*"], "weight_decay": 0.0}, {"patterns": ["0.weight"], "lr_scale": 0.1}]
    groups[0]["patterns"] = ["2.bias", "1.*"]
    config = make_config({"lr": 0.5, "weight_decay": 0.2, "betas": [0.8, 0.9], "param_groups": groups})
    module = model()
    optimizer = OptimizerFactory(config).build_named(list(module.named_parameters()))
    options = {
        name: (group["lr"], group["weight_decay"], group["betas"])
        for group in optimizer.param_groups
        for name, parameter in module.named_parameters()
        if any(parameter is held for held in group["params"])
    }
    assert options == {
        "0.weight": (0.05, 0.2, (0.8, 0.9)),
        "1.weight": (0.5, 0.0, (0.8, 0.9)),
        "1.bias": (0.5, 0.0, (0.8, 0.9)),
        "2.weight": (0.5, 0.2, (0.8, 0.9)),
        "2.bias": (0.5, 0.0, (0.8, 0.9)),
    }


def test_frozen_parameters_are_left_out():
    module = model()
    module[0].weight.requires_grad_(False)
    optimizer = OptimizerFactory(make_config({"lr": 0.1})).build_named(list(module.named_parameters()))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_dead_pattern_is_an_error_with_a_hint():
    with pytest.raises(ConfigError, match=r"'2\.biass' matches none of 2 parameters \(did you mean '2\.bias'\?\)"):
        assign_groups(["2.weight", "2.bias"], [ParamGroup(patterns=("2.biass",))])


def test_overlapping_patterns_are_an_error():
    rules = [ParamGroup(patterns=("*.bias",)), ParamGroup(patterns=("1.*",))]
    with pytest.raises(ConfigError, match=r"param_groups\.0 and \.1 both match '1\.bias'"):
        assign_groups(["1.weight", "1.bias"], rules)
    assert assign_groups(["1.bias"], [ParamGroup(patterns=("*.bias", "1.*"))]) == {"1.bias": 0}


def test_sgd_and_its_momentum():
    optimizer = OptimizerFactory(make_config({"name": "sgd", "lr": 0.1, "momentum": 0.9})).build_named(
        list(model().named_parameters())
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.9


def test_cosine_rises_and_falls():
    schedule = ScheduleConfig(kind="cosine", warmup_steps=4, min_lr_fraction=0.1)
    rates = [lr_fraction(schedule, step, 104) for step in range(105)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert lr_fraction(schedule, 500, 104) == pytest.approx(0.1)
    assert [lr_fraction(ScheduleConfig(), step, 3) for step in range(3)] == [1.0, 1.0, 1.0]


def test_the_learning_rate_follows_the_step_in_every_group():
    # The bug: wrappers that advance the schedule once per process or per micro-batch.
    config = make_config(
        {"lr": 1.0, "param_groups": [{"patterns": ["0.*"], "lr_scale": 0.5}]}, {"kind": "cosine", "warmup_steps": 3}
    )
    optimizer = OptimizerFactory(config).build_named(list(model().named_parameters()))
    schedule = LRSchedule(optimizer, config)
    for step in (0, 2, 5, 2):
        fraction = lr_fraction(config.schedule, step, 6)
        assert schedule.set_step(step) == pytest.approx(fraction)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([fraction, fraction / 2])


@pytest.mark.parametrize("shape", [((5, 3), (5,)), ((2, 4, 3), (2, 4)), ((2, 3, 4, 4), (2, 4, 4))])
def test_cross_entropy_takes_classes_last_or_second(shape):
    logits, targets = torch.randn(shape[0]), torch.randint(3, shape[1])
    targets.view(-1)[0] = -100
    loss = cross_entropy(logits, (None, targets))
    classes_second = logits if logits.dim() in (2, 4) else logits.movedim(-1, 1)
    assert loss.weight == targets.numel() - 1
    torch.testing.assert_close(loss.sum / loss.weight, F.cross_entropy(classes_second, targets))


def test_losses_refuse_shapes_that_would_broadcast():
    with pytest.raises(ConfigError, match="one dim more"):
        cross_entropy(torch.zeros(4, 3), (None, torch.zeros(5, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="broadcasting"):
        mean_squared_error(torch.zeros(4, 1), (None, torch.zeros(4)))
    loss = mean_squared_error(torch.ones(4, 2), (None, torch.zeros(4, 2)))
    assert (float(loss.sum), loss.weight) == (8.0, 8)
