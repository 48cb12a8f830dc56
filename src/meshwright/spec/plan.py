"""Plan: the strategies of a run, on one line for people and as JSON for everything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from meshwright.errors import ConfigError
from meshwright.spec.plan_text import format_line, parse_line, resolve_preset
from meshwright.spec.prediction import Prediction
from meshwright.texts import html_block, html_table
from meshwright.units import format_bytes, format_seconds
from meshwright.values import FrozenMap, Problems, Value

if TYPE_CHECKING:
    from meshwright.mesh import MeshSpec

__all__: list[str] = []

Mode = Literal["ranks", "data_parallel", "model_parallel"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16"]
Compress = Literal["none", "bf16", "int8", "int4", "powersgd"]
Offload = Literal["none", "optimizer"]
Batch = Literal["auto", "split", "whole"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Value):
    """How a model is laid over devices.

    What means the same is the same: ``shard`` equal to ``dp``, and ``sequence_parallel`` equal to what ``tp`` implies,
    become None; ``zbv`` always has two stages a rank; with ``dp=1`` a batch is whole anyway. ``reasons`` and ``prediction``
    explain the plan and are left out of ``==`` and ``hash``.

    Args:
        mode: "ranks" is one process per device; "data_parallel" one process with a thread per device; "model_parallel"
            one process with the layers spread over the devices.
        dp: Data parallel degree: the batch is split.
        tp: Tensor parallel degree: each layer's weights are split.
        pp: Pipeline parallel degree: the layers are split. In mode "model_parallel" the number of devices.
        cp: Context parallel degree: the sequence is split.
        zero: ZeRO's stage, what is sharded over dp: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        shard: Neighbours on the dp axis that ZeRO shards over, a divisor of dp; None means all of dp [count].
        micro_batches: Forward passes of one step on each dp rank [count].
        schedule: The order of work in a pipeline.
        virtual: Stages that a pp rank holds [count].
        sequence_parallel: Split activations outside tensor parallel blocks too; None means where tp > 1.
        recompute: Activation checkpointing.
        precision: "fp32" computes in the model's own dtype, "bf16" in bfloat16 with full-precision parameters.
        compress: What gradients are sent as.
        overlap: Communicate while computing.
        offload: What is kept in the host's memory; "optimizer" is the state of this rank's shards, which are updated there.
        batch: What a dp rank takes of each global batch: "split" its share, "whole" all samples, as ranks that share layers do.
            "whole" is for models whose samples see one another: ZeRO still saves memory, and dp no time. "auto" is "split", and
            "whole" where the first batch shows that shares do not give one device's loss; ranks join their shares then, and
            a pipeline its micro-batches. "split" refuses such a batch, of a pipeline without dp as well.
        micro_batch_size: Samples of one forward pass; None splits what comes [samples].
        bucket_bytes: Size of a gradient bucket, and of what ZeRO-2 lets lie before it is summed; None is the default [bytes].
        whole_below: ZeRO-3 keeps layers with fewer bytes of parameters whole; None is the default [bytes].
        layouts: FQN -> how that parameter is split, as text.
        stages: Module name -> the stage that it runs in, counted from 0.
        reasons: Why this plan, for people.
        prediction: What it is expected to cost.

    Raises:
        ConfigError: A value is unknown, or a rule is broken; all of them are reported at once.

    >>> plan = Plan.parse("pp=2, dp=2, micro_batches=8", num_devices=4)
    >>> str(plan), plan.num_devices, plan.mesh.shape
    ('dp=2,pp=2,micro_batches=8', 4, (2, 2, 1, 1))
    >>> str(Plan.parse("distributed,micro_batches=2", num_devices=4))
    'dp=4,micro_batches=2'
    """

    FORMAT: ClassVar[str] = "plan"

    mode: Mode = "ranks"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    shard: int | None = None
    micro_batches: int = 1
    schedule: Schedule = "1f1b"
    virtual: int = 1
    sequence_parallel: bool | None = None
    recompute: Recompute = "none"
    precision: Precision = "fp32"
    compress: Compress = "none"
    overlap: bool = True
    offload: Offload = "none"
    batch: Batch = "auto"
    micro_batch_size: int | None = None
    bucket_bytes: int | None = None
    whole_below: int | None = None
    layouts: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap[str])
    stages: Mapping[str, int] = dataclasses.field(default_factory=FrozenMap[int])
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    prediction: Prediction | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        if self.shard == self.dp:
            self._set(shard=None)
        if self.sequence_parallel == (self.tp > 1):
            self._set(sequence_parallel=None)
        if self.dp == 1 or self.mode != "ranks":
            # Shares are one thing that "split" keeps, a pipeline's micro-batches another.
            is_kept = self.mode == "ranks" and self.pp > 1 if self.batch == "split" else self.dp > 1
            if not is_kept:
                self._set(batch="auto")
        if self.schedule == "zbv" and self.virtual == 1:
            self._set(virtual=2)
        problems = Problems("plan")
        self._check_numbers(problems)
        problems.check()
        self._check_mode(problems)
        self._check_data(problems)
        self._check_pipeline(problems)
        problems.check()

    def __str__(self) -> str:
        implied = {"virtual": 2} if self.schedule == "zbv" else {}
        differing = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _DETAILS and getattr(self, field.name) != implied.get(field.name, field.default)
        }
        return format_line(differing)

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it: what it predicts, why it is laid out so, and where layers lie."""
        facts: list[tuple[str, str]] = [("devices", str(self.num_devices))]
        if self.prediction is not None:
            facts += [
                ("step, predicted", format_seconds(self.prediction.step_s)),
                ("peak memory, predicted", format_bytes(self.prediction.peak_bytes)),
            ]
        parts = [html_table(["", ""], facts)]
        if self.reasons:
            parts.append(html_table(["why"], [[reason] for reason in self.reasons]))
        places = [
            (name, self.layouts.get(name, ""), self.stages.get(name, "")) for name in {**self.stages, **self.layouts}
        ]
        if places:
            parts.append(html_table(["layer or tensor", "layout", "stage"], places))
        return html_block(f"plan {self}", *parts)

    @classmethod
    def parse(cls, text: str, num_devices: int | None = None) -> Self:
        """Read the one-line form.

        Args:
            text: ``key=value`` pairs with commas between them; the first word may be a preset, whose degree then fills
                what is left of ``num_devices``. Spaces are ignored.
            num_devices: The devices that the plan must use, or None for as many as its degrees say [count].

        Returns:
            The plan.

        Raises:
            ConfigError: Something is unknown, repeated or out of range, or the degrees do not multiply to the devices.

        >>> str(Plan.parse("zero2", num_devices=4)), str(Plan.parse("distributed", num_devices=1))
        ('dp=4,zero=2', 'single')
        """
        _check_num_devices(num_devices)
        preset, entries = parse_line(text)
        if preset is not None:
            entries = resolve_preset(preset, entries, num_devices)
        plan = cls(**entries)
        if num_devices is not None and plan.num_devices != num_devices:
            raise ConfigError(
                f"plan: '{plan}' uses {_count(plan.num_devices)}, but {num_devices} "
                f"{'is' if num_devices == 1 else 'are'} given (rule: the degrees multiply to the number of devices)",
                fix=plan._fix_for_devices(num_devices),
            )
        return plan

    @classmethod
    def preset(cls, name: str, num_devices: int | None = None) -> Self:
        """Return a plan by its preset's name, over all the devices.

        Args:
            name: single, data_parallel, model_parallel, distributed, zero1, zero2, zero3, tensor, pipeline, hybrid or
                auto. ``hybrid`` gives factors of two to tp, pp and dp in turn and the rest to dp (8 -> 2 x 2 x 2,
                4 -> tp 2, pp 2, 2 -> tp 2); a pipeline's preset has two micro-batches a stage. ``auto`` is data
                parallel here, where there is no model to plan for.
            num_devices: The devices to use; None is 1 [count].

        Raises:
            ConfigError: There is no such preset, or it cannot use that many devices.

        >>> str(Plan.preset("hybrid", 8))
        'dp=2,tp=2,pp=2,micro_batches=4'
        """
        if "=" in name or "," in name:
            raise ConfigError(f"plan: '{name}' is not a preset's name", fix=f"Plan.parse({name!r})")
        _check_num_devices(num_devices)
        if num_devices is None and name.strip() == "single":
            num_devices = 1
        return cls.parse(name, num_devices)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; every rule is checked again.

        A new ``schedule`` without a new ``virtual`` drops the two stages a rank that ``zbv`` implies.

        Raises:
            ConfigError: A field is unknown, or the result breaks a rule.

        >>> str(Plan.parse("dp=4").replace(zero=1))
        'dp=4,zero=1'
        """
        if self.schedule == "zbv" and changes.get("schedule", "zbv") not in ("zbv", "interleaved"):
            changes.setdefault("virtual", 1)
        # Spelled out: slots=True makes a second class, which super() without arguments does not know.
        return cast("Self", Value.replace(self, **changes))

    @property
    def num_devices(self) -> int:
        """The devices that it uses: the product of the degrees [count]."""
        return math.prod((self.dp, self.tp, self.pp, self.cp))

    @property
    def num_ranks(self) -> int:
        """The processes that it runs in: one per device, or 1 in the one-process modes [count]."""
        return self.num_devices if self.mode == "ranks" else 1

    @property
    def num_shares(self) -> int:
        """The parts that ranks share a global batch out in: ``dp``, or 1 where each takes the whole batch [count]."""
        return 1 if self.batch == "whole" else self.dp

    @property
    def num_stages(self) -> int:
        """The pipeline stages over all ranks [count]."""
        return self.pp * self.virtual

    @property
    def mesh(self) -> MeshSpec:
        """The devices as a mesh; in mode "ranks" also the ranks."""
        from meshwright.mesh import MeshSpec  # a search of plans asks for none

        return MeshSpec(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def shard_degree(self) -> int:
        """The dp neighbours that ZeRO shards over: ``shard``, or all of ``dp`` [count]."""
        return self.dp if self.shard is None else self.shard

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations outside tensor parallel blocks are split too: what None stands for, resolved."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    def _check_numbers(self, problems: Problems) -> None:
        for name in ("dp", "tp", "pp", "cp", "micro_batches", "virtual"):
            number = getattr(self, name)
            problems.require(number >= 1, f"{name}={number} (rule: {name} is at least 1)", fix=f"{name}=1")
        for name in ("shard", "micro_batch_size", "bucket_bytes"):
            number = getattr(self, name)
            rule = f"{name}={number} (rule: {name} is at least 1)"
            problems.require(number is None or number >= 1, rule, fix=f"leave out {name}=")
        problems.require(
            0 <= self.zero <= 3,
            f"zero={self.zero} (rule: zero is 0, 1, 2 or 3)",
            fix=f"zero={min(max(self.zero, 0), 3)}",
        )

    def _check_mode(self, problems: Problems) -> None:
        if self.mode == "ranks":
            return
        axis = "dp" if self.mode == "data_parallel" else "pp"
        for other in ("dp", "tp", "pp", "cp"):
            problems.require(
                other == axis or getattr(self, other) == 1,
                f"mode={self.mode} with {other}={getattr(self, other)} (rule: its only degree is {axis})",
                fix=f"{other}=1, or mode=ranks",
            )
        for name, off in (("zero", 0), ("compress", "none"), ("schedule", "1f1b"), ("virtual", 1), ("batch", "auto")):
            value = getattr(self, name)
            problems.require(
                value == off,
                f"mode={self.mode} with {name}={value} (rule: {name} needs one process per device)",
                fix=f"{name}={off}, or mode=ranks",
            )

    def _check_data(self, problems: Problems) -> None:
        if self.shard is not None:
            problems.require(
                self.dp % self.shard == 0,
                f"shard={self.shard} with dp={self.dp} (rule: shard divides dp)",
                fix=f"shard={math.gcd(self.dp, self.shard)}",
            )
            problems.require(
                self.zero > 0,
                f"shard={self.shard} with zero=0 (rule: shard says where ZeRO shards, so zero is 1, 2 or 3)",
                fix="zero=1",
            )
        problems.require(
            self.offload == "none" or self.zero > 0,
            f"offload={self.offload} with zero=0 (rule: a rank offloads the state of its shards, so zero is 1, 2 or 3)",
            fix="zero=1",
        )
        problems.require(
            self.whole_below is None or (self.zero == 3 and self.whole_below >= 0),
            f"whole_below={self.whole_below} with zero={self.zero} (rule: it says what ZeRO-3 leaves whole, and is not negative)",
            fix="zero=3",
        )
        problems.require(
            not self.sequence_parallel or self.tp > 1,
            f"sequence_parallel=on with tp={self.tp} (rule: it splits over tp, so tp is at least 2)",
            fix="sequence_parallel=off",
        )

    def _check_pipeline(self, problems: Problems) -> None:
        if self.mode == "ranks":
            problems.require(
                self.schedule == "1f1b" or self.pp > 1,
                f"schedule={self.schedule} with pp={self.pp} (rule: it orders a pipeline, so pp is at least 2)",
                fix="schedule=1f1b",
            )
            if self.schedule == "interleaved":
                problems.require(
                    self.virtual > 1,
                    f"schedule=interleaved with virtual={self.virtual} (rule: a rank has several stages)",
                    fix="virtual=2",
                )
            elif self.schedule == "zbv":
                problems.require(
                    self.virtual == 2,
                    f"schedule=zbv with virtual={self.virtual} (rule: it is a V, so a rank has two stages)",
                    fix="virtual=2",
                )
            else:
                problems.require(
                    self.virtual == 1,
                    f"virtual={self.virtual} with schedule={self.schedule} (rule: only interleaved and zbv have "
                    "several stages a rank)",
                    fix="virtual=1",
                )
        for module, stage in self.stages.items():
            problems.require(
                0 <= stage < self.num_stages,
                f"stages['{module}']={stage} (rule: 0 <= stage < pp * virtual = {self.num_stages})",
                fix=f"give '{module}' a stage from 0 to {self.num_stages - 1}",
            )

    def _fix_for_devices(self, num_devices: int) -> str:
        axes = {"data_parallel": ("dp",), "model_parallel": ("pp",), "ranks": ("dp", "tp", "pp", "cp")}[self.mode]
        for axis in axes:
            rest = self.num_devices // getattr(self, axis)
            if num_devices % rest == 0:
                try:
                    plan = self.replace(**{axis: num_devices // rest})
                except ConfigError:
                    continue
                return f"use the plan '{plan}', or {_count(self.num_devices)}"
        return f"use {_count(self.num_devices)}"


_DETAILS = ("layouts", "stages", "reasons", "prediction")


def _check_num_devices(num_devices: int | None) -> None:
    whole = isinstance(num_devices, int) and not isinstance(num_devices, bool)
    if num_devices is not None and not (whole and num_devices >= 1):
        raise ConfigError(
            f"plan: num_devices={num_devices!r} (rule: a whole number, at least 1)", fix="give it one device or more"
        )


def _count(num_devices: int) -> str:
    return f"{num_devices} device{'' if num_devices == 1 else 's'}"
