"""The configuration of a training run. Never imports torch: every mistake is found before a rank starts.

Example::

    [model]      target = "package.module:callable" | "hf:folder/config.json", kwargs = {...}
    [data]       source = "python-stdlib" | "files" | "digits" | "package.module:callable", ...
    [optimizer]  name = "adamw" | "sgd" | "package.module:callable", lr = 3e-4, ...
    [schedule]   kind = "constant" | "cosine", warmup_steps = 20, min_lr_fraction = 0.1
    [train]      steps = 100, global_batch_size = 32, plan = "distributed", devices = 2, ...
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from meshwright.errors import ConfigError, did_you_mean

__all__: list[str] = []

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# TOML and JSON know lists only; inside, the entries stay strict.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Betas = Annotated[tuple[float, float], Field(strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ModelConfig(_Section):
    """What is trained."""

    target: Annotated[str, Field(min_length=1)]
    """"package.module:callable" that returns an `nn.Module`, or "hf:folder/config.json"."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the callable, or fields of the Hugging Face config to replace."""


class DataConfig(_Section):
    """What it is trained on."""

    source: Annotated[str, Field(min_length=1)]
    """"python-stdlib", "files", "digits", or "package.module:callable", called with split="train" and split="eval"."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of a callable source."""
    sequence_length: PositiveInt = 128
    """Tokens in one sample of the text sources [bytes]."""
    files: Texts = ()
    """Glob patterns of source = "files", relative to the configuration's folder."""
    eval_files: Texts = ()
    """The same for held-out files; without them the end of every file is held out."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the text that is held out."""
    max_bytes: PositiveInt = 16_000_000
    """At most this much text is read for training [bytes]."""
    shuffle: bool = True
    drop_last: bool = False
    """Leave out an epoch's last batch where it is not full."""
    num_workers: NonNegativeInt = 0
    """Processes that read samples for each rank; 0: a thread."""
    prefetch: NonNegativeInt = 2
    """Batches that are read ahead."""
    sample_rng: bool | None = None
    """Seed torch, numpy and random for every sample; None: where the dataset may draw random numbers."""


class ParamGroup(_Section):
    """Other settings for the parameters whose names match."""

    patterns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Shell-style patterns of parameter names in the full model, for example "*.bias"."""
    lr_scale: NonNegativeFloat = 1.0
    """The learning rate is multiplied by this."""
    weight_decay: NonNegativeFloat | None = None
    """None: the optimizer's."""


class OptimizerConfig(_Section):
    """How parameters are updated."""

    name: Annotated[str, Field(min_length=1)] = "adamw"
    """"adamw", "sgd", or "package.module:callable", called with the parameters, lr and kwargs."""
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    betas: Betas | None = None
    """Of adamw; None: (0.9, 0.999)."""
    momentum: NonNegativeFloat | None = None
    """Of sgd; None: 0."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the optimizer."""
    param_groups: Annotated[tuple[ParamGroup, ...], Field(strict=False)] = ()


class ScheduleConfig(_Section):
    """The learning rate as a function of the optimizer step."""

    kind: Literal["constant", "cosine", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] = "constant"
    """The last three are DeepSpeed's, step by step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate grows linearly from nearly 0."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the cosine ends, as a share of lr."""
    warmup_type: Literal["linear", "log"] = "linear"
    """How DeepSpeed's kinds grow."""
    start_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where DeepSpeed's kinds start, as a share of lr."""
    total_steps: PositiveInt | None = None
    """Where DeepSpeed's kinds end; None: with the run [count]."""


class TrainSection(_Section):
    """The loop."""

    steps: PositiveInt
    """Optimizer steps."""
    global_batch_size: PositiveInt
    """Samples in one step, over all ranks and micro-batches."""
    micro_batches: PositiveInt | None = None
    """Pieces each rank cuts its share into; None: what the plan says."""
    loss: str = "auto"
    """"auto", "cross_entropy", "mse", "model" (its own `.loss`), or "package.module:callable" of (outputs, batch)."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: NonNegativeInt | None = None
    """Global batches in one evaluation; 0: never evaluate; None: all held-out data."""
    max_grad_norm: PositiveFloat | None = None
    precision: Literal["fp32", "bf16"] | None = None
    """None: what the plan says, which is fp32 unless it says otherwise."""
    seed: NonNegativeInt = 0
    non_finite: Literal["stop", "skip"] = "stop"
    sentinel_every: NonNegativeInt = 100
    """Steps between two comparisons of what ranks must have alike; 0: none."""
    on_finding: Literal["stop", "warn"] = "stop"
    """What a difference does, before the optimizer."""
    plan: Annotated[str, Field(min_length=1)] = "auto"
    """A plan's line, a preset, "auto", a plan's JSON file, or a DeepSpeed configuration's."""
    devices: PositiveInt | None = None
    """How many devices a preset is spread over; None: this machine's cores."""
    print_every: NonNegativeInt | None = None
    """Steps between lines of progress; 0: none; None: a line every two seconds."""
    max_seconds: PositiveFloat | None = None
    """Stop after this long [s]; counts as done."""
    name: str | None = None
    """The run's folder; None: the configuration file's name."""
    directory: str = "runs"
    """Where the runs' folders are, relative to the working directory."""


class TrainConfig(_Section):
    """A whole configuration, checked. Frozen; travels to the ranks as JSON."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainSection
    base_directory: str
    """The configuration file's folder: relative paths start here, and it is on `sys.path` in the ranks."""
    plan_json: str
    """The plan that came of `train.plan`, `train.devices`, `train.micro_batches` and `train.precision`."""
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What the user should be told before the run starts."""
    plan_rows: Annotated[tuple[tuple[str, str, str, str], ...], Field(strict=False)] = ()
    """How each key of a DeepSpeed configuration was read: key, given, resolved, why."""

    @property
    def run_name(self) -> str:
        """The name of the run's folder."""
        return self.train.name or "run"

    @property
    def import_roots(self) -> tuple[str, ...]:
        """Folders that come first on `sys.path` in the ranks."""
        return tuple(dict.fromkeys((self.base_directory, os.getcwd())))


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plan: str | None = None,
    devices: int | None = None,
) -> TrainConfig:
    """Read a TOML file and check everything that can be checked without torch.

    Args:
        path: The TOML file.
        overrides: "section.key=value", each replacing what the file says; values as in TOML, or bare text.
        plan: Replaces `train.plan`.
        devices: Replaces `train.devices`.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Anything is wrong; the message names the file, the key and the rule.
        MissingDependencyError: An optional package is needed; the message has the line that installs it.
    """
    from meshwright.train.config.checks import check_config, resolve_plan, safe_name
    from meshwright.train.config.deepspeed import apply_changes

    path = Path(path)
    text = _read(path)
    tables = _parse(text, path)
    for override in overrides:
        _set(tables, override)
    tables |= {"plan_json": "{}", "base_directory": str(path.absolute().parent)}
    train = tables.setdefault("train", {})
    if isinstance(train, dict):
        train.setdefault("name", safe_name(path.stem))
        train |= {"plan": plan} if plan is not None else {}
        train |= {"devices": devices} if devices is not None else {}
        # An explicit plan says itself how many devices it needs; the file's number was meant for the file's plan.
        resolved = resolve_plan(
            train,
            train.get("devices"),
            path.absolute().parent,
            plan_from_command_line=plan is not None,
            devices_from_command_line=devices is not None,
            sections=tables,
        )
        apply_changes(tables, resolved.changes, overrides, train.get("plan", "auto"))
        tables |= {"plan_json": resolved.plan_json, "notes": resolved.notes, "plan_rows": resolved.plan_rows}
    config = _validate(tables, text, path, overrides)
    return check_config(config)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [found.stem for found in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no configuration file {path}{did_you_mean(path.stem, near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for reserved in ("base_directory", "plan_json", "notes", "plan_rows"):
        if reserved in tables:
            raise ConfigError(f"{path}: unknown key '{reserved}'; known: {', '.join(_SECTIONS)}")
    return tables


def _set(tables: dict[str, Any], override: str) -> None:
    """Put "a.b=value" into the tables."""
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: not of the form section.key=value", fix="--set train.steps=100")
    if len(parts) == 1:
        raise ConfigError(
            f"--set {override}: '{parts[0]}' names no section; known: {', '.join(_SECTIONS)}",
            fix=f"--set train.{override}",
        )
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: '{part}' is not a table")
    table[parts[-1]] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    try:
        # A line break would let the value smuggle in further keys.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _validate(tables: Mapping[str, Any], text: str, path: Path, overrides: Sequence[str]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(tables)
    except pydantic.ValidationError as error:
        from_command_line = {override.partition("=")[0].strip() for override in overrides}
        messages = []
        for problem in error.errors(include_url=False):
            dotted = ".".join(str(part) for part in problem["loc"])
            where = "--set" if dotted in from_command_line else _place(path, text, problem["loc"])
            message = f"{where}: {_explain(dotted, problem)}"
            if message not in messages:
                messages.append(message)
        raise ConfigError("\n".join(messages)) from None


def _explain(dotted: str, problem: Any) -> str:
    kind, location = problem["type"], problem["loc"]
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        elsewhere = [f"{section}.{location[-1]}" for section in _SECTIONS if location[-1] in _known_keys((section,))]
        hint = did_you_mean(str(location[-1]), known) or did_you_mean(dotted, elsewhere)
        return f"unknown key '{dotted}'{hint}; known: {', '.join(known)}"
    if kind == "missing":
        if len(location) == 1:
            return f"the section [{dotted}] is missing"
        return f"'{dotted}' is missing"
    value = problem.get("input")
    got = f"{value!r}" if not isinstance(value, dict | BaseModel) else "a table"
    rule = problem["msg"].removeprefix("Input ").replace("valid tuple", "list")
    return f"'{dotted}' = {got}: {rule}"


_SECTIONS = ("model", "data", "optimizer", "schedule", "train")


def _known_keys(location: Iterable[Any]) -> list[str]:
    kind: type[BaseModel] = TrainConfig
    for part in location:
        if isinstance(part, int):
            continue
        if part == "param_groups":
            kind = ParamGroup
            continue
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(_SECTIONS) if kind is TrainConfig else list(kind.model_fields)


def _place(path: Path, text: str, location: Sequence[Any]) -> str:
    """Name the file, and the line of a key that is written in it in the usual way."""
    section, key = ".".join(str(part) for part in location[:-1] if isinstance(part, str)), str(location[-1])
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[]# ")
            if len(location) == 1 and current == key:
                return f"{path}:{number}"
        elif current == section and stripped.partition("=")[0].strip() == key:
            return f"{path}:{number}"
    return str(path)
