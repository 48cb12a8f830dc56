"""Expected cost of a step in seconds and bytes, broken down. The planner fills it in; nothing here computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from meshwright.units import format_bytes, format_seconds
from meshwright.values import FrozenMap, Problems, Value

__all__: list[str] = []


class _Breakdown(Value):
    """Parts that must not be negative and add up to a total."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems(self.FORMAT)
        for name, part in self.to_dict().items():
            problems.require(part >= 0, f"{name}={part} (rule: a part is not negative)")
        problems.check()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown(_Breakdown):
    """One step's wall time on the slowest rank, in parts that do not overlap and add up.

    Args:
        forward_s: Arithmetic of the forward passes [s].
        backward_s: Arithmetic of the backward passes, without recompute [s].
        recompute_s: Forward work done again because of recompute [s].
        bubble_s: Waiting for another pipeline stage [s].
        exposed_comm_s: Communication that nothing hides [s].
        optimizer_s: The parameter update [s].
    """

    FORMAT: ClassVar[str] = "time"

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    bubble_s: float = 0.0
    exposed_comm_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The step's time [s]: the sum of the parts."""
        parts = (self.forward_s, self.backward_s, self.recompute_s, self.bubble_s)
        return sum(parts) + self.exposed_comm_s + self.optimizer_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown(_Breakdown):
    """Memory of one device at the step's peak, on the fullest rank.

    Args:
        parameters_bytes: The parameters [bytes].
        gradients_bytes: Their gradients [bytes].
        optimizer_bytes: The optimizer's state, master copies included [bytes].
        activations_bytes: What backward needs from forward [bytes].
        buffers_bytes: Communication buckets, workspaces and the rest [bytes].
    """

    FORMAT: ClassVar[str] = "memory"

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    buffers_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak [bytes]: the sum of the parts."""
        model_states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return model_states + self.activations_bytes + self.buffers_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Value):
    """Expected cost of one step of a plan.

    Args:
        time: Seconds of one step, on the slowest rank.
        memory: Bytes at the peak, on the fullest rank.
        sent_bytes: Axis -> bytes that one rank sends along it in one step.
        mfu: Model FLOPs, without recompute, over the dense peak; 0 to 1. None where the peak is not known.

    >>> prediction = Prediction(time=TimeBreakdown(forward_s=1.0, backward_s=2.0, bubble_s=1.0))
    >>> prediction.step_s, prediction.bubble_fraction
    (4.0, 0.25)
    """

    FORMAT: ClassVar[str] = "prediction"

    time: TimeBreakdown = TimeBreakdown()
    memory: MemoryBreakdown = MemoryBreakdown()
    sent_bytes: Mapping[str, int] = dataclasses.field(default_factory=FrozenMap[int])
    mfu: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("prediction")
        problems.require(self.mfu is None or 0 <= self.mfu <= 1, f"mfu={self.mfu} (rule: 0 <= mfu <= 1)")
        for axis, sent in self.sent_bytes.items():
            problems.require(sent >= 0, f"sent_bytes['{axis}']={sent} (rule: a size is not negative)")
        problems.check()

    def __str__(self) -> str:
        return f"{format_seconds(self.step_s)} a step, {format_bytes(self.peak_bytes)} a device"

    @property
    def step_s(self) -> float:
        """The step's time [s]."""
        return self.time.step_s

    @property
    def peak_bytes(self) -> int:
        """The memory's peak on the fullest device [bytes]."""
        return self.memory.peak_bytes

    @property
    def bubble_fraction(self) -> float:
        """Idle time over step time, 0 to 1; 0 for a step that takes no time."""
        return self.time.bubble_s / self.step_s if self.step_s > 0 else 0.0
