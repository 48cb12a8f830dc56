"""Checks of a configuration beyond its types. They import neither torch nor the user's code."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.host import usable_cores
from meshwright.plan.deepspeed.reader import is_saved_value, parse_text, read_deepspeed
from meshwright.ranks.environment import read_place
from meshwright.spec.plan import Plan
from meshwright.spec.plan_text import PRESETS, parse_line
from meshwright.spec.supported import refuse_unbuilt
from meshwright.texts import read_text
from meshwright.train.config.deepspeed import PlanRow, rows_of, settings_of
from meshwright.train.config.targets import check_data, check_loss, check_model, check_optimizer
from meshwright.train.config.traced_steps import check_trace
from meshwright.train.config.types import TrainConfig
from meshwright.train.loggers.fan_out import require_packages

__all__: list[str] = []

_SAFE_NAME = re.compile(r"\w[\w .+-]{0,99}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A plan, and what to tell the user about how it came to be.

    Args:
        plan: The plan.
        notes: Lines for the user.
        changes: What a DeepSpeed configuration sets besides: section -> key -> value.
        plan_rows: How each of its keys was read.
    """

    plan: Plan
    notes: tuple[str, ...] = ()
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    plan_rows: tuple[PlanRow, ...] = ()


def resolve_plan(
    sections: Mapping[str, Any], *, plan_from_command_line: bool, devices_from_command_line: bool
) -> ResolvedPlan:
    """Make the plan that the [train] section asks for.

    Args:
        sections: The whole configuration as it was read, not checked yet, with the folder of relative paths.
        plan_from_command_line: The plan is not the file's, so that the file's number of devices need not fit it.
        devices_from_command_line: The number of devices is not the file's.

    Raises:
        ConfigError: The plan's line is wrong, or contradicts another key.
    """
    train, base = sections["train"], Path(sections["base_directory"])
    text, devices = train.get("plan", "auto"), train.get("devices")
    count, kind = visible_devices()
    if not isinstance(text, str) or not _is_count(devices):
        return ResolvedPlan(plan=Plan())  # the types are about to be complained about
    fixed = devices_from_command_line or not plan_from_command_line
    if text.endswith(".json"):
        written, entries = _read_json(text, base)
        if not is_saved_value(entries):
            source = "--devices" if devices_from_command_line else "train.devices"
            return _resolve_deepspeed(text, entries, sections, base, devices, fixed=fixed, devices_from=source)
        plan, given = Plan.from_json(written), {"micro_batches", "precision"}
    else:
        preset, entries = parse_line(text)
        given = set(entries)
        if preset is not None and not set(PRESETS[preset].fills) <= given:
            spread = devices if devices is not None else _default_spread(count, train)
            plan = Plan.parse(text, num_devices=spread)
        else:
            plan = Plan.parse(text, num_devices=devices if fixed else None)
    plan = _merge(plan, train, given)
    refuse_unbuilt(plan)
    return ResolvedPlan(plan=plan, notes=tuple(_warn_of_devices(plan, count, kind)))


def _resolve_deepspeed(
    text: str,
    entries: dict[str, Any],
    sections: Mapping[str, Any],
    base: Path,
    devices: int | None,
    *,
    fixed: bool,
    devices_from: str,
) -> ResolvedPlan:
    """Make the plan of a DeepSpeed configuration, which like a preset does not say how many devices it is for."""
    count, kind = visible_devices()
    num_devices = devices if fixed else None
    if num_devices is None and kind == "rank":
        num_devices, devices_from = count, "this job's ranks"
    elif devices is None:
        devices_from = f"this machine's {kind}s"
    resolution = read_deepspeed(
        entries,
        name=os.path.basename(text),
        settings=settings_of(sections, base),
        num_devices=num_devices,
        available=devices or count,
        devices_from=devices_from,
    )
    refuse_unbuilt(resolution.plan)
    return ResolvedPlan(
        plan=resolution.plan,
        notes=tuple(_warn_of_devices(resolution.plan, count, kind)),
        changes=resolution.to_dict()["changes"],
        plan_rows=rows_of(resolution, sections),
    )


def _warn_of_devices(plan: Plan, count: int, kind: str) -> list[str]:
    if plan.num_devices <= count:
        return []
    return [f"warning: the plan '{plan}' uses {plan.num_devices} devices, there are {count} {kind}s"]


def safe_name(text: str) -> str:
    """Return a run's name made of a file's: one path component without surprises."""
    return re.sub(r"[^\w .+-]", "_", text).lstrip(" .+-")[:100] or "run"


def visible_devices() -> tuple[int, str]:
    """Count the ranks of the job that this process belongs to, else this machine's GPUs, else the cores it may use."""
    place = read_place(os.environ)
    if place.world_size > 1:
        return place.world_size, "rank"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = Path("/proc/driver/nvidia/gpus")
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    if num_gpus and chosen is not None:
        num_gpus = min(num_gpus, len([entry for entry in chosen.split(",") if entry.strip() not in ("", "-1")]))
    return (num_gpus, "GPU") if num_gpus else (usable_cores(), "core")


def check_config(config: TrainConfig) -> TrainConfig:
    """Check a configuration as a whole and return it.

    Raises:
        ConfigError: Something is wrong.
        MissingDependencyError: An optional package is needed.
    """
    _check_name(config)
    _check_sizes(config)
    check_model(config)
    check_data(config)
    check_optimizer(config)
    _check_schedule(config)
    check_loss(config)
    _check_checkpoint(config)
    check_trace(config)
    require_packages(config.train.log)
    notes = (*config.notes, *_warnings(config))
    return config.model_copy(update={"notes": notes})


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _default_spread(count: int, train: dict[str, Any]) -> int:
    batch = train.get("global_batch_size")
    return min(count, batch) if isinstance(batch, int) and batch >= 1 else count


def _read_json(text: str, base: Path) -> tuple[str, dict[str, Any]]:
    """Return a plan file's text, and the object in it."""
    path = base / text
    if not os.path.exists(path):
        path = Path(text)
    try:
        written = read_text(path)
    except OSError as error:
        raise ConfigError(
            f"train.plan = {_shortened(text)} cannot be read: {error.strerror}",
            fix="--plan dp=2, or a file that is there",
        ) from None
    return written, parse_text(written, os.path.basename(text))


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 100 else f"{text[:97]!r}..."


def _merge(plan: Plan, train: dict[str, Any], given: set[str]) -> Plan:
    for key in ("micro_batches", "precision"):
        wanted = train.get(key)
        if wanted is None or not isinstance(wanted, type(getattr(plan, key))) or wanted == getattr(plan, key):
            continue
        if key in given:
            raise ConfigError(
                f"train.{key} = {wanted!r}, but train.plan says {key}={getattr(plan, key)}",
                fix=f"leave out train.{key}",
            )
        if key == "precision" and wanted not in ("fp32", "bf16"):
            continue  # complained about with the key's own rule
        plan = plan.replace(**{key: wanted})
    return plan


def _check_name(config: TrainConfig) -> None:
    name = config.train.name or ""
    if not _SAFE_NAME.fullmatch(name):
        raise ConfigError(
            f"train.name = {name!r} (rule: one path component of letters, digits, '_', ' ', '.', '+', '-', that starts "
            "with a letter, a digit or '_', of at most 100 characters)",
            fix="--set train.name=my_run",
        )


def _check_sizes(config: TrainConfig) -> None:
    train, plan = config.train, config.plan
    pieces = plan.num_shares * plan.micro_batches
    if train.global_batch_size < pieces:
        shares = "micro_batches =" if plan.batch == "whole" else f"dp x micro_batches = {plan.num_shares} x"
        raise ConfigError(
            f"train.global_batch_size = {train.global_batch_size} under the plan '{plan}' (rule: at least {shares} "
            f"{plan.micro_batches} = {pieces} samples, one for each piece)",
            fix=f"--set train.global_batch_size={pieces}",
        )
    if train.eval_every and train.eval_batches == 0:
        raise ConfigError(
            f"train.eval_every = {train.eval_every} with train.eval_batches = 0: nothing to evaluate on",
            fix="--set train.eval_every=0, or leave out train.eval_batches",
        )


def _warnings(config: TrainConfig) -> list[str]:
    warmup, steps, restarts = config.schedule.warmup_steps, config.train.steps, config.train.max_restarts
    found = []
    if warmup > steps:
        found.append(
            f"warning: schedule.warmup_steps = {warmup} with train.steps = {steps}: the run ends before the warm-up does"
        )
    if restarts and not (config.checkpoint.every_steps or config.checkpoint.every_minutes):
        found.append(
            f"warning: train.max_restarts = {restarts} without checkpoint.every_steps or checkpoint.every_minutes: a restart "
            "begins anew"
        )
    return found


def _check_schedule(config: TrainConfig) -> None:
    schedule = config.schedule
    if schedule.kind in ("constant", "cosine"):
        for name, off in (("warmup_type", "linear"), ("start_fraction", 0.0), ("total_steps", None)):
            value = getattr(schedule, name)
            if value != off:
                raise ConfigError(
                    f"schedule.{name} = {value!r} with schedule.kind = {schedule.kind!r} (rule: it is for DeepSpeed's kinds)",
                    fix="--set schedule.kind=WarmupCosineLR",
                )


def _check_checkpoint(config: TrainConfig) -> None:
    if config.checkpoint.best and config.train.eval_every == 0:
        raise ConfigError(
            "checkpoint.best = true with train.eval_every = 0 (rule: the best is found by evaluations during the run)",
            fix="--set train.eval_every=100, or leave out checkpoint.best",
        )
