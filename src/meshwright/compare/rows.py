"""Raw samples of one plan, and the row of numbers derived from them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshwright.spec.prediction import Prediction
from meshwright.values import Problems, Value

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Value):
    """One run of one plan, as raw samples; warm-up steps are left out everywhere but in ``losses``.

    Args:
        name: What the user called the plan.
        plan: The plan's canonical line.
        mode: The plan's mode: "ranks", "data_parallel" or "model_parallel".
        num_devices: Devices of the plan [count].
        num_ranks: Processes that it ran in [count].
        threads: Threads that one device computes with [count].
        device: "cpu", or the GPU's name; empty where the run failed before it was known.
        step_seconds: Wall time of each step on the slowest rank, reading of data left out [s].
        num_samples: Samples of each step, over all ranks [count].
        num_tokens: Tokens of each step, over all ranks; the samples where the data has no tokens [count].
        losses: Loss of each step, from the first warm-up step on; None where it was not finite.
        sent_bytes: By step and rank: what the ledger counted [bytes].
        wait_seconds: By step and rank: time for which the computing thread waited for exchanges [s]; empty where the host
            cannot see it.
        formula_bytes: Expected bytes of one rank in a step [bytes]; None for a plan without a formula.
        peak_memory_bytes: By rank, or by device where one process has several [bytes].
        other_cores: Cores that other work kept busy during the measured steps [count]; None: not known.
        turn_s: What a fixed piece of the interpreter's work took meanwhile, mean of the ranks; 0: not known [s].
        measured_turn_s: The same when the machine was measured, for the prediction; 0: not known [s].
        prediction: What a step should cost, from before the run; None where nothing was predicted.
        error: Why there are no samples.
        is_baseline: Whether the run was added as a baseline, without a request.

    Raises:
        ConfigError: A number is out of range, or the samples differ in number.
    """

    FORMAT: ClassVar[str] = "trial"

    name: str
    plan: str
    mode: str = "ranks"
    num_devices: int = 1
    num_ranks: int = 1
    threads: int = 1
    device: str = ""
    step_seconds: tuple[float, ...] = ()
    num_samples: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    sent_bytes: tuple[tuple[float, ...], ...] = ()
    wait_seconds: tuple[tuple[float, ...], ...] = ()
    formula_bytes: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    other_cores: float | None = None
    turn_s: float = 0.0
    measured_turn_s: float = 0.0
    prediction: Prediction | None = None
    error: str | None = None
    is_baseline: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(f"trial of '{self.name}'")
        for name in ("num_devices", "num_ranks", "threads"):
            problems.require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} (rule: at least 1)")
        for index, seconds in enumerate(self.step_seconds):
            problems.require(seconds > 0, f"step_seconds[{index}]={seconds} (rule: a step takes time)")
        steps = len(self.step_seconds)
        problems.require(steps > 0 or self.error is not None, "no step and no error (rule: one of them)")
        for name in ("num_samples", "num_tokens", "sent_bytes"):
            length = len(getattr(self, name))
            problems.require(length == steps, f"{name} has {length} entries for {steps} steps")
        problems.require(len(self.wait_seconds) in (0, steps), f"wait_seconds has {len(self.wait_seconds)} entries")
        problems.check()

    @property
    def pace(self) -> float | None:
        """The speed of the interpreter over that when the machine was measured [ratio]; None where one is not known."""
        return self.measured_turn_s / self.turn_s if self.turn_s and self.measured_turn_s else None

    @property
    def is_on_cpu(self) -> bool:
        """Whether it computed on CPU cores."""
        return self.device == "cpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow(Value):
    """One run in numbers; None is "not known", and everything is None where the run failed.

    Args:
        trial: The samples that all of it comes from.
        step_s: Median step [s].
        low_s: First quartile of the steps [s].
        high_s: Third quartile of the steps [s].
        samples_per_s: Samples of a step over the median step [1/s].
        tokens_per_s: Tokens of a step over the median step [1/s]; None where the data has no tokens.
        speedup_same_cores: Times as fast as ``single`` on all the cores of the comparison [ratio].
        speedup: S: times as fast as ``single`` on what one device of this plan computes with [ratio].
        efficiency: S over the number of devices [fraction].
        parallel_fraction: Amdahl's p that S amounts to, not clipped [fraction]; None for one device.
        peak_memory_bytes: The most that a rank (or GPU) held [bytes].
        sent_bytes: What a rank sent in a step by the ledger's count, mean over ranks and steps [bytes].
        sent_ratio: That over the formula's bytes [ratio]; None where the formula says 0 or there is none.
        step_prediction_ratio: Measured over predicted step [ratio]; None where nothing was predicted, as in the next two.
        memory_prediction_ratio: The same for the peak of memory [ratio].
        sent_prediction_ratio: The same for what a rank sent; None too where that was to be nothing [ratio].
        exposed_s: Time in a step for which ranks waited for exchanges, mean over ranks, median over steps [s].
        exposed_fraction: That as a share of its step, median over steps [fraction].
        loss_difference: Largest relative difference of a step's loss to that of ``single`` [fraction].
        num_incomparable: Steps whose losses have none though they differ: one is not finite, or single's is 0 [count].
    """

    FORMAT: ClassVar[str] = "comparison_row"

    trial: Trial
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    speedup_same_cores: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    parallel_fraction: float | None = None
    peak_memory_bytes: int | None = None
    sent_bytes: float | None = None
    sent_ratio: float | None = None
    step_prediction_ratio: float | None = None
    memory_prediction_ratio: float | None = None
    sent_prediction_ratio: float | None = None
    exposed_s: float | None = None
    exposed_fraction: float | None = None
    loss_difference: float | None = None
    num_incomparable: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
