"""The optimizer, its parameter groups by name, and the learning rate of each step."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, did_you_mean
from meshwright.train.config.imports import import_callable
from meshwright.train.config.types import OptimizerConfig, ParamGroup, ScheduleConfig, TrainConfig

__all__: list[str] = []


class OptimizerFactory:
    """Builds the configuration's optimizer over named parameters.

    Raises:
        ConfigError: The optimizer cannot be imported.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config.optimizer
        self._make = _optimizer_class(config)

    def build_named(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer of these (FQN, parameter) pairs; those that do not require a gradient are left out.

        Raises:
            ConfigError: A pattern matches no parameter, or two rules match one.
        """
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        owners = assign_groups([name for name, _ in trainable], self._config.param_groups)
        return self._make(_groups(self._config, trainable, owners))


def assign_groups(names: Sequence[str], rules: Sequence[ParamGroup]) -> dict[str, int]:
    """Return, for each parameter that a rule claims, the rule's number.

    The names are those of the full model: evaluated on a part of it, a rule would fail where its parameters are elsewhere.

    Args:
        names: FQNs of all trainable parameters.
        rules: The [[optimizer.param_groups]].

    Raises:
        ConfigError: A pattern matches no parameter, or two rules match one.
    """
    owners: dict[str, int] = {}
    for number, rule in enumerate(rules):
        for pattern in rule.patterns:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise ConfigError(
                    f"optimizer.param_groups.{number}: the pattern {pattern!r} matches none of {len(names)} parameters"
                    f"{did_you_mean(pattern, names)}; they are {_some(names)}",
                    fix="correct the pattern, or leave it out",
                )
            for name in matching:
                if owners.setdefault(name, number) != number:
                    raise ConfigError(
                        f"optimizer.param_groups.{owners[name]} and .{number} both match '{name}' (rule: one group for "
                        "each parameter)",
                        fix="narrow one of the patterns",
                    )
    return owners


def lr_fraction(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a step as a share of the configured one.

    The warm-up is linear and reaches 1 with its last step; the cosine then falls to `min_lr_fraction`. Steps are optimizer
    steps, skipped ones included, whatever the number of ranks and micro-batches.

    Args:
        schedule: The [schedule] section.
        step: The step about to be taken, from 0.
        num_steps: Steps of the whole run [count].

    >>> lr_fraction(ScheduleConfig(kind="cosine", warmup_steps=2), 0, 10)
    0.5
    """
    if schedule.kind.startswith("Warmup"):
        return deepspeed_fraction(schedule, step, num_steps)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_steps - schedule.warmup_steps))
    return schedule.min_lr_fraction + (1 - schedule.min_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2


def deepspeed_fraction(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a step as a share of the peak, as DeepSpeed's WarmupLR, -DecayLR or -CosineLR sets it.

    DeepSpeed's schedulers move on after a step, from -1: the first two steps have the warm-up's start.

    Args:
        schedule: The [schedule] section.
        step: The step about to be taken, from 0.
        num_steps: Steps of the whole run, where the schedule does not say over how many it falls [count].

    Source:
        deepspeed 0.19.8, `runtime/lr_schedules.py`.

    >>> deepspeed_fraction(ScheduleConfig(kind="WarmupLR", warmup_steps=4), 3, 10)
    0.5
    """
    done, start, warmup = step - 1, schedule.start_fraction, max(2, schedule.warmup_steps)
    if done < 0:
        return 0.0 if schedule.kind == "WarmupCosineLR" else start
    if done < warmup:
        grown = math.log(done + 1) / math.log(warmup) if schedule.warmup_type == "log" else done / warmup
        return start + (1 - start) * grown
    total = schedule.total_steps or num_steps
    if schedule.kind == "WarmupCosineLR":
        progress = min(1.0, (done - warmup + 1) / max(1, total - warmup))
        return schedule.min_lr_fraction + (1 - schedule.min_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.kind == "WarmupDecayLR":
        return start + (1 - start) * max(0.0, (total - done) / max(1, total - warmup))
    return 1.0


class LRSchedule:
    """Sets an optimizer's learning rates before each step, as a function of the step alone: a run continues it by its step.

    Args:
        optimizer: The optimizer, with its groups at their full learning rates: before a checkpoint is loaded into it.
        config: The configuration.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self._optimizer = optimizer
        self._full = [group["lr"] for group in optimizer.param_groups]
        self._config = config

    def set_step(self, step: int) -> float:
        """Set the learning rates of a step, from 0; returns the configured one at that step."""
        fraction = lr_fraction(self._config.schedule, step, self._config.train.steps)
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full * fraction
        return self._config.optimizer.lr * fraction


def _optimizer_class(config: TrainConfig) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    optimizer = config.optimizer
    settings: dict[str, Any] = {"lr": optimizer.lr, **optimizer.kwargs}
    if optimizer.name == "adamw":
        settings |= {"weight_decay": optimizer.weight_decay, "betas": optimizer.betas or (0.9, 0.999)}
        make: Callable[..., Any] = torch.optim.AdamW
    elif optimizer.name == "sgd":
        settings |= {"weight_decay": optimizer.weight_decay, "momentum": optimizer.momentum or 0.0}
        make = torch.optim.SGD
    else:
        make = import_callable(optimizer.name, config.import_roots)
        if optimizer.weight_decay:
            settings["weight_decay"] = optimizer.weight_decay
    return lambda groups: make(groups, **settings)


def _groups(
    optimizer: OptimizerConfig, named_parameters: Sequence[tuple[str, nn.Parameter]], owners: Mapping[str, int]
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": [p for name, p in named_parameters if name not in owners]}]
    for number, rule in enumerate(optimizer.param_groups):
        group: dict[str, Any] = {
            "params": [p for name, p in named_parameters if owners.get(name) == number],
            "lr": optimizer.lr * rule.lr_scale,
        }
        if rule.weight_decay is not None:
            group["weight_decay"] = rule.weight_decay
        groups.append(group)
    return [group for group in groups if group["params"]]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
