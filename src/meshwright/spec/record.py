"""Record of a run: config, plan, prediction, measurement, environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.spec.plan import Plan
from meshwright.spec.prediction import Prediction
from meshwright.values import FrozenMap, Problems, Value

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Value):
    """Measurements, as raw samples.

    Args:
        step_seconds: Wall time of every measured step, warm-up left out [s].
        num_samples: Samples in those steps, over all ranks [count].
        num_tokens: Tokens in those steps, over all ranks; 0 where there are none [count].
        peak_memory_bytes: The most that any rank held; None where it was not measured [bytes].
        sent_bytes: Axis -> bytes that rank 0 sent along it in `num_sent_steps` steps.
        num_sent_steps: Steps of the process that `sent_bytes` counts, warm-up and evaluations included; 0: not told [count].
        rank_peak_memory_bytes: The most that each rank held, by rank; () where they did not tell [bytes].
        rank_wait_s: Each rank's median time in a step for which it stood still for exchanges; () where that was not measured [s].
        held_bytes: "parameters", "gradients", "optimizer" -> what the fullest rank held of them at the end [bytes].
        num_skipped_steps: Steps whose loss or gradient was not finite, so that nothing was updated; warm-up included [count].
        loss: The last step's loss; None where it was not finite or not measured.

    Raises:
        ConfigError: A number is negative.

    >>> Measurement(step_seconds=[0.2, 0.1, 0.4], num_samples=30).step_s
    0.2
    """

    FORMAT: ClassVar[str] = "measurement"

    step_seconds: tuple[float, ...] = ()
    num_samples: int = 0
    num_tokens: int = 0
    peak_memory_bytes: int | None = None
    sent_bytes: Mapping[str, int] = dataclasses.field(default_factory=FrozenMap[int])
    num_sent_steps: int = 0
    rank_peak_memory_bytes: tuple[int, ...] = ()
    rank_wait_s: tuple[float, ...] = ()
    held_bytes: Mapping[str, int] = dataclasses.field(default_factory=FrozenMap[int])
    num_skipped_steps: int = 0
    loss: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("measurement")
        for index, seconds in enumerate(self.step_seconds):
            problems.require(seconds >= 0, f"step_seconds[{index}]={seconds} (rule: a time is not negative)")
        for name in ("num_samples", "num_tokens", "peak_memory_bytes", "num_sent_steps", "num_skipped_steps"):
            number = getattr(self, name)
            problems.require(number is None or number >= 0, f"{name}={number} (rule: it is not negative)")
        for axis, sent in self.sent_bytes.items():
            problems.require(sent >= 0, f"sent_bytes['{axis}']={sent} (rule: a size is not negative)")
        for kind, held in self.held_bytes.items():
            problems.require(held >= 0, f"held_bytes['{kind}']={held} (rule: a size is not negative)")
        for name in ("rank_peak_memory_bytes", "rank_wait_s"):
            for rank, number in enumerate(getattr(self, name)):
                problems.require(number >= 0, f"{name}[{rank}]={number} (rule: it is not negative)")
        problems.check()

    @property
    def step_s(self) -> float | None:
        """The median step [s]; None where no step was measured."""
        import statistics  # it loads four other modules, and a plan needs none

        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples over wall time of all measured steps; None where no time was measured."""
        seconds = sum(self.step_seconds)
        return self.num_samples / seconds if seconds > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over wall time of all measured steps; None where no time was measured."""
        seconds = sum(self.step_seconds)
        return self.num_tokens / seconds if seconds > 0 else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor(Value):
    """The parts of one parameter or buffer that ranks hold.

    Args:
        shape: Shape of the full tensor.
        held: Ranks, as in "0-3,8" -> the part that each of them holds, in words.
    """

    FORMAT: ClassVar[str] = "held_tensor"

    shape: tuple[int, ...]
    held: Mapping[str, str]

    def __post_init__(self) -> None:
        self._check_types()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Value):
    """One run, whole: ``record.json``.

    Args:
        plan: The plan.
        config: The resolved configuration, as plain JSON data.
        prediction: The plan's expected cost, if it was predicted.
        measurement: The measurement, if there was one.
        environment: Versions, host and devices, as plain JSON data.
        tensors: FQN -> the full tensor's shape and the parts that ranks hold; empty where no step was done.
        num_tensors_left_out: Small tensors that are not listed, since there are too many [count].

    Raises:
        ConfigError: Something in it is not JSON data.
    """

    FORMAT: ClassVar[str] = "record"

    plan: Plan
    config: Mapping[str, Any] = dataclasses.field(default_factory=FrozenMap[Any])
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    environment: Mapping[str, Any] = dataclasses.field(default_factory=FrozenMap[Any])
    tensors: Mapping[str, HeldTensor] = dataclasses.field(default_factory=FrozenMap[HeldTensor])
    num_tensors_left_out: int = 0

    def __post_init__(self) -> None:
        self._check_types()

    @property
    def step_time_ratio(self) -> float | None:
        """Measured over predicted step time; None where one of them is missing."""
        measured = self.measurement.step_s if self.measurement is not None else None
        if measured is None or self.prediction is None or self.prediction.step_s <= 0:
            return None
        return measured / self.prediction.step_s
