"""Checks of what a script passes to `apply_plan` and `save_checkpoint`, before anything is built or exchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import loss as losses_of_torch

from meshwright.errors import ConfigError
from meshwright.spec import Plan

__all__: list[str] = []

_SEEDS: Final = (-(2**63), 2**64 - 1)
"""What torch.manual_seed takes."""


def check_arguments(build_model: Any, plan: Any, loss_fn: Any, split: Any) -> None:
    """Refuse arguments of `apply_plan` that are of another kind than it takes.

    Raises:
        ConfigError: What it is, and what to pass.
    """
    if not callable(build_model):
        raise ConfigError(
            f"build_model is {_a(build_model)}; it must be an nn.Module, or a function without arguments that builds one",
            fix="pass the model, or functools.partial(Model, ...)",
        )
    if not isinstance(plan, (str, Plan)):
        raise ConfigError(f"plan is {_a(plan)}; it must be a Plan, or its one-line form", fix="plan='dp=2' for example")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {_a(loss_fn)}; it must be a function of (outputs, batch), or None for the model's own loss",
            fix="loss_fn=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1])",
        )
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == losses_of_torch.__name__:
        name = type(loss_fn).__name__
        raise ConfigError(
            f"loss_fn is a torch.nn.{name}, which takes outputs and targets; loss_fn gets the outputs and the whole batch",
            fix=f"loss = torch.nn.{name}(...); loss_fn=lambda outputs, batch: loss(outputs, batch[1])",
        )
    if split is not None and not callable(split):
        raise ConfigError(
            f"split is {_a(split)}; it must be a function (batch, num_parts) -> list of batches", fix="leave out split="
        )


def check_options(max_grad_norm: float | None, non_finite: str, rng: str = "torch", seed: int = 0) -> None:
    """Raise ConfigError for options of `apply_plan` that are out of range."""
    if max_grad_norm is not None and (isinstance(max_grad_norm, str) or not max_grad_norm > 0):
        raise ConfigError(
            f"max_grad_norm must be above 0, it is {max_grad_norm!r}", fix="pass None to leave gradients as they are"
        )
    if non_finite not in ("stop", "skip"):
        raise ConfigError(f"non_finite must be 'stop' or 'skip', it is {non_finite!r}", fix="pass non_finite='stop'")
    if rng not in ("torch", "global"):
        raise ConfigError(f"rng must be 'torch' or 'global', it is {rng!r}", fix="pass rng='torch'")
    if not isinstance(seed, int) or not _SEEDS[0] <= seed <= _SEEDS[1]:
        raise ConfigError(f"seed must be a whole number from -2^63 to 2^64 - 1, it is {seed!r}", fix="pass seed=0")


def check_save(step: Any, keep: Any) -> None:
    """Raise ConfigError for a step or a number of checkpoints that is out of range, or no whole number."""
    is_whole = all(type(number) is int for number in (step, 1 if keep is None else keep))
    if not is_whole or step < 0 or (keep is not None and keep < 1):
        raise ConfigError(
            f"save_checkpoint: step={step!r}, keep={keep!r} (rule: step is a whole number, at least 0; keep one of at least 1, "
            "or None)",
            fix="save_checkpoint(model, directory, step=n) with the number of steps taken, an int",
        )


def check_directory(call: str, directory: Any) -> Path:
    """Return the directory of checkpoints that a script has named.

    Args:
        call: The call, for the message.
        directory: A text or a path.

    Raises:
        ConfigError: It is of another kind, or no name of a directory.
    """
    try:
        name = os.fspath(directory)
    except TypeError:
        name = None
    if not isinstance(name, str) or "\0" in name:
        what = f"{directory!r}, which has a NUL" if isinstance(name, str) else _a(directory)
        raise ConfigError(
            f"{call}: the directory is {what} (rule: a text or a path)",
            fix=f"{call}(model, 'checkpoints') for example, with the text of a path",
        )
    return Path(name)


def check_step_to_load(step: Any) -> None:
    """Raise ConfigError for a step that is no whole number."""
    if step is not None and type(step) is not int:
        raise ConfigError(
            f"load_checkpoint: step={step!r} (rule: a whole number, or None for the newest)", fix="leave out step="
        )


def read_devices(devices: Any) -> list[torch.device]:
    """Return the devices that a script has named.

    Raises:
        ConfigError: Torch knows no such device.
    """
    fix = "devices=['cpu'], or ['cuda:0'] for example; leave it out for the visible GPUs, else the CPU"
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ConfigError(f"devices={devices!r} (rule: a list of devices)", fix=fix)
    found: list[torch.device] = []
    for device in devices:
        try:
            found.append(torch.device(device))
        except (RuntimeError, TypeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError(f"devices= has {device!r}, which torch takes for no device: {why}", fix=fix) from error
    return found


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
