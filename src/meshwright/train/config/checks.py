"""Checks of a configuration beyond its types. They import neither torch nor the user's code."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, MissingDependencyError, did_you_mean
from meshwright.host import usable_cores
from meshwright.plan.deepspeed.reader import is_saved_value, parse_text, read_deepspeed
from meshwright.ranks.environment import read_place
from meshwright.spec.plan import Plan
from meshwright.spec.plan_text import PRESETS, parse_line
from meshwright.spec.supported import refuse_unbuilt
from meshwright.texts import is_directory, parse_json, read_text
from meshwright.train.config.deepspeed import PlanRow, rows_of, settings_of
from meshwright.train.config.imports import check_callable
from meshwright.train.config.traced_steps import check_trace
from meshwright.train.config.types import TrainConfig
from meshwright.train.loggers.fan_out import require_packages

__all__: list[str] = []

TEXT_SOURCES = ("python-stdlib", "files")
BUILT_IN_SOURCES = (*TEXT_SOURCES, "digits")
BUILT_IN_LOSSES = ("auto", "cross_entropy", "mse", "model")
BUILT_IN_OPTIMIZERS = ("adamw", "sgd")

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
    _check_model(config)
    _check_data(config)
    _check_optimizer(config)
    _check_schedule(config)
    _check_loss(config)
    _check_checkpoint(config)
    check_trace(config)
    require_packages(config.train.log)
    notes = (*config.notes, *_warnings(config))
    return config.model_copy(update={"notes": notes})


def resolve_loss(config: TrainConfig) -> str:
    """Return what loss = "auto" stands for, or the loss that is named."""
    if config.train.loss != "auto":
        return config.train.loss
    if config.model.target.startswith("hf:"):
        return "model"
    if config.data.source in BUILT_IN_SOURCES:
        return "cross_entropy"
    raise ConfigError(
        f"train.loss = 'auto' cannot know the loss of data.source = {config.data.source!r}",
        fix='train.loss = "cross_entropy", "mse", "model" or "package.module:callable"',
    )


def data_files(config: TrainConfig, patterns: tuple[str, ...]) -> list[str]:
    """Return the files that match, sorted, each once; relative patterns start at the configuration's folder."""
    found = {
        path
        for pattern in patterns
        for path in glob.glob(os.path.join(config.base_directory, os.path.expanduser(pattern)), recursive=True)
        if os.path.isfile(path)
    }
    return sorted(found)


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
        raise ConfigError(f"train.plan = {_shortened(text)} cannot be read: {error.strerror}") from None
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
    pieces = plan.dp * plan.micro_batches
    if train.global_batch_size < pieces:
        raise ConfigError(
            f"train.global_batch_size = {train.global_batch_size} under the plan '{plan}' (rule: at least dp x "
            f"micro_batches = {plan.dp} x {plan.micro_batches} = {pieces} samples, one for each piece)",
            fix=f"--set train.global_batch_size={pieces}",
        )
    if train.eval_every and train.eval_batches == 0:
        raise ConfigError(f"train.eval_every = {train.eval_every} with train.eval_batches = 0: nothing to evaluate on")


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


def _check_model(config: TrainConfig) -> None:
    target, pretrained = config.model.target, config.model.pretrained
    if pretrained is not None and not is_directory(Path(config.base_directory) / pretrained):
        raise ConfigError(
            f"model.pretrained = {pretrained!r}: there is no directory {Path(config.base_directory) / pretrained}",
            fix="name a directory that save_pretrained wrote, relative to the configuration's folder",
        )
    if not target.startswith("hf:"):
        check_callable(target, key="model.target", roots=config.import_roots, keywords=config.model.kwargs)
        return
    path = hf_config_path(config)
    try:
        parse_json(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"model.target = {target!r}: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.target = {target!r}: {path} is not readable JSON: {error}") from None
    _require_package("transformers", "hf", f"model.target = {target!r}")


def hf_config_path(config: TrainConfig) -> Path:
    """Return the Hugging Face config.json that "hf:path" names; a folder means the file in it."""
    path = Path(config.base_directory) / config.model.target.removeprefix("hf:")
    return path / "config.json" if is_directory(path) else path


def _check_data(config: TrainConfig) -> None:
    data = config.data
    if data.source not in BUILT_IN_SOURCES:
        keywords = {"split": "train", **data.kwargs}
        rule = "called with split='train', with split='eval' for held-out data, and with data.kwargs"
        check_callable(data.source, key="data.source", roots=config.import_roots, keywords=keywords, rule=rule)
        return
    if data.kwargs:
        raise ConfigError(f"data.kwargs are for a callable source, data.source is {data.source!r}")
    if data.source != "files" and (data.files or data.eval_files):
        raise ConfigError(f'data.files are for data.source = "files", which is {data.source!r}')
    if data.source == "digits":
        _require_package("sklearn", "digits", 'data.source = "digits"')
    if data.source == "files":
        if not data.files:
            raise ConfigError('data.source = "files" needs data.files', fix='data.files = ["corpus/*.txt"]')
        _check_text(config, "data.files", data.files)
        if data.eval_files:
            _check_text(config, "data.eval_files", data.eval_files)


def _check_text(config: TrainConfig, key: str, patterns: tuple[str, ...]) -> None:
    found = data_files(config, patterns)
    if not found:
        raise ConfigError(f"{key} = {list(patterns)}: no file matches in {config.base_directory}")
    size = 0
    for name in found:
        try:
            with open(name, "rb") as file:
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{key}: {name} cannot be read: {error.strerror}") from None
    # Without held-out files each split needs at least one sample, and a sample one byte more than its length.
    held_out = 0.0 if key == "data.eval_files" or config.data.eval_files else config.data.eval_fraction
    smallest = min(size * held_out, size * (1 - held_out)) if held_out else size
    if smallest < config.data.sequence_length + 1:
        raise ConfigError(
            f"{key}: {len(found)} files hold {size} bytes (rule: training and held-out text have at least "
            f"data.sequence_length + 1 = {config.data.sequence_length + 1} bytes each)",
            fix="more text, or a smaller data.sequence_length",
        )


def _check_optimizer(config: TrainConfig) -> None:
    optimizer = config.optimizer
    if optimizer.betas is not None and optimizer.name != "adamw":
        raise ConfigError(f"optimizer.betas are adamw's, optimizer.name is {optimizer.name!r}")
    if optimizer.betas is not None and not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(f"optimizer.betas = {list(optimizer.betas)} (rule: 0 <= beta < 1)")
    if optimizer.momentum is not None and optimizer.name != "sgd":
        raise ConfigError(f"optimizer.momentum is sgd's, optimizer.name is {optimizer.name!r}")
    if optimizer.name not in BUILT_IN_OPTIMIZERS:
        if ":" not in optimizer.name:
            raise _unknown("optimizer.name", optimizer.name, BUILT_IN_OPTIMIZERS)
        check_callable(optimizer.name, key="optimizer.name", roots=config.import_roots)


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


def _check_loss(config: TrainConfig) -> None:
    loss = resolve_loss(config)
    if loss in BUILT_IN_LOSSES:
        return
    if ":" not in loss:
        raise _unknown("train.loss", loss, BUILT_IN_LOSSES)
    check_callable(loss, key="train.loss", roots=config.import_roots, positional=2, keywords={})


def _check_checkpoint(config: TrainConfig) -> None:
    if config.checkpoint.best and config.train.eval_every == 0:
        raise ConfigError(
            "checkpoint.best = true with train.eval_every = 0 (rule: the best is found by evaluations during the run)",
            fix="--set train.eval_every=100, or leave out checkpoint.best",
        )


def _require_package(module: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(f"{what} needs the package '{module}'", fix=f"pip install 'meshwright[{extra}]'")


def _unknown(key: str, name: str, known: Iterable[str]) -> ConfigError:
    hint = did_you_mean(name, known)
    return ConfigError(f"{key} = {name!r}{hint}; known: {', '.join(known)}, package.module:callable")
