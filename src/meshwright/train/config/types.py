"""The configuration of a training run. Never imports torch: every mistake is found before a rank starts.

Example::

    [model]      target = "package.module:callable" | "hf:folder/config.json", kwargs = {...}
    [data]       source = "python-stdlib" | "files" | "digits" | "package.module:callable", ...
    [optimizer]  name = "adamw" | "sgd" | "package.module:callable", lr = 3e-4, ...
    [schedule]   kind = "constant" | "cosine", warmup_steps = 20, min_lr_fraction = 0.1
    [train]      steps = 100, global_batch_size = 32, plan = "distributed", devices = 2, ...
    [checkpoint] every_steps = 500, every_minutes = 30, keep = 3, at_end = true, best = false, on_error = "stop" | "warn"
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from meshwright.spec.plan import Plan

__all__: list[str] = []

MOST_COUNT = 2**53
"""Largest count: ranks add counts up as float64, which is exact up to here."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# TOML and JSON know lists only; inside, the entries stay strict.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Betas = Annotated[tuple[float, float], Field(strict=False)]


def _read_plan(value: Any) -> Any:
    """Return the plan that JSON holds; a plan is one already."""
    return Plan.from_dict(value) if isinstance(value, dict) else value


def _step_as_text(value: Any) -> Any:
    """Return one step, a whole number in TOML, as text."""
    return str(value) if type(value) is int else value


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )


class ModelConfig(_Section):
    """What is trained."""

    target: Annotated[str, Field(min_length=1)]
    """"package.module:callable" that returns an `nn.Module`, or "hf:folder/config.json"."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the callable, or fields of the Hugging Face config to replace."""
    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """Directory that save_pretrained wrote, relative to the configuration's folder, whose weights the model begins with."""


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
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that read samples for each rank; 0: a thread."""
    prefetch: Annotated[int, Field(ge=0, le=4096)] = 2
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
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    non_finite: Literal["stop", "skip"] = "stop"
    sentinel_every: NonNegativeInt = 100
    """Steps between two comparisons of what ranks must have alike; 0: none."""
    on_finding: Literal["stop", "warn"] = "stop"
    """What a difference does, before the optimizer."""
    rng: Literal["torch", "global"] = "global"
    """What decides a forward's random numbers: seed, step, sample, call and element, whatever the plan; or torch's generators."""
    sync_batch_norm: bool = False
    """Whether BatchNorm layers normalise over the samples of all ranks, as one device does."""
    plan: Annotated[str, Field(min_length=1)] = "auto"
    """A plan's line, a preset, "auto", a plan's JSON file, or a DeepSpeed configuration's."""
    devices: PositiveInt | None = None
    """How many devices a preset is spread over; None: this machine's cores."""
    trace: Annotated[str | None, BeforeValidator(_step_as_text)] = None
    """Steps that are recorded on all ranks, as in "10" or "10-12"; None: none."""
    profiler: bool = False
    """Whether torch.profiler's operators are added to these steps."""
    log: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "csv"], ...], Field(strict=False)] = ()
    """Where the numbers of steps and evaluations go beside events.jsonl."""
    print_every: NonNegativeInt | None = None
    """Steps between lines of progress; 0: none; None: a line every two seconds."""
    max_seconds: PositiveFloat | None = None
    """Stop after this long [s]; counts as done."""
    max_restarts: NonNegativeInt = 0
    """How often ranks that were killed or lost are started again, from the newest checkpoint [count]."""
    timeout_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 300.0
    """How long a rank may wait for the others in one exchange before the one that it waits for is named, and the run ends [s]."""
    name: str | None = None
    """The run's folder; None: the configuration file's name."""
    directory: str = "runs"
    """Where the runs' folders are, relative to the working directory."""


class CheckpointConfig(_Section):
    """When the run is saved, and what stays of it."""

    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; 0: none by steps."""
    every_minutes: NonNegativeFloat = 0.0
    """Time between checkpoints, by rank 0's clock; 0: none by time [min]."""
    keep: NonNegativeInt = 3
    """How many of the newest stay; 0: all [count]."""
    at_end: bool = True
    """Save where the run ends: all steps done, the time over, or asked to stop."""
    best: bool = False
    """Save where the held-out loss is the lowest so far, and keep that one too."""
    on_error: Literal["stop", "warn"] = "stop"
    """What a save that fails does to the run."""
    background: bool = False
    """Copy in the host's memory and write while training goes on. Off: it needs memory for what a rank saves."""

    @property
    def is_on(self) -> bool:
        """Whether anything is ever saved."""
        return bool(self.every_steps or self.every_minutes or self.at_end or self.best)


class TrainConfig(_Section):
    """A whole configuration, checked. Frozen; travels to the ranks as JSON."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainSection
    checkpoint: CheckpointConfig = CheckpointConfig()
    base_directory: str
    """The configuration file's folder: relative paths start here, and it is last on `sys.path` in the ranks."""
    plan: Annotated[Plan, BeforeValidator(_read_plan), PlainSerializer(Plan.to_dict)]
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
    def plan_is_auto(self) -> bool:
        """Whether the plan is left to the planner."""
        return self.train.plan.split(",")[0].strip() == "auto"

    @property
    def run_directory(self) -> Path:
        """The run's folder."""
        return Path(self.train.directory) / self.run_name

    @property
    def checkpoint_directory(self) -> Path:
        """The folder of its checkpoints."""
        return self.run_directory / "checkpoints"

    @property
    def import_roots(self) -> tuple[str, ...]:
        """Folders of the modules that it names: the configuration's, which comes last on `sys.path` in the ranks."""
        return (self.base_directory,)
