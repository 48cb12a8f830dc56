"""The maths of a comparison: spreads, speed-ups and Amdahl's law. Pure functions, no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from meshwright.errors import ConfigError
from meshwright.traffic import require_devices

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The median of some samples, and the quartiles that hold the middle half of them; in the samples' unit."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Tell whether the middle halves have a value in common, so that the medians' difference may be noise."""
        return self.low <= other.high and other.low <= self.high


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and the quartiles, interpolated between samples.

    Args:
        samples: At least one [any one unit].

    Raises:
        ConfigError: There is no sample.

    >>> spread([1, 2, 3, 4, 100])
    Spread(low=2.0, median=3.0, high=4.0)
    """
    if not samples:
        raise ConfigError("a median needs at least one sample")
    values = [float(sample) for sample in samples]
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high)


def speedup(baseline_s: float, plan_s: float) -> float:
    """Return how many times faster the plan's step is than the baseline's.

    Args:
        baseline_s: Step time of the baseline [s].
        plan_s: Step time of the plan [s].

    Raises:
        ConfigError: A time is not positive.

    >>> speedup(3.0, 2.0)
    1.5
    """
    if not (baseline_s > 0 and plan_s > 0):
        raise ConfigError(f"a speed-up of {baseline_s} s over {plan_s} s (rule: both times are above 0)")
    return baseline_s / plan_s


def amdahl_parallel_fraction(measured_speedup: float, num_devices: int) -> float | None:
    """Return the parallel fraction that a measured speed-up amounts to: ``(1 - 1 / S) / (1 - 1 / n)``.

    Nothing is clipped. Above 1 the devices together were more than n times as fast as one (caches, noise); below 0 they were
    slower than one.

    Args:
        measured_speedup: S, time on one device over time on n, positive [ratio].
        num_devices: n [count].

    Returns:
        p [fraction]; None for one device, on which every p gives S = 1.

    Raises:
        ConfigError: ``measured_speedup`` or ``num_devices`` is not positive.

    Source:
        Amdahl 1967, doi:10.1145/1465482.1465560, solved for p (Karp & Flatt 1990, doi:10.1145/78607.78614, solve the
        same equation for 1 - p).

    >>> amdahl_parallel_fraction(2.0, 2), amdahl_parallel_fraction(1.0, 4), amdahl_parallel_fraction(0.5, 2)
    (1.0, 0.0, -2.0)
    """
    require_devices(num_devices)
    if not measured_speedup > 0:
        raise ConfigError(f"a speed-up of {measured_speedup} (rule: it is above 0)")
    if num_devices == 1:
        return None
    return (1 - 1 / measured_speedup) / (1 - 1 / num_devices)


def relative_difference(value: float, reference: float) -> float:
    """Return ``|value - reference| / |reference|``; 0 where both are 0, infinite where only the reference is.

    >>> relative_difference(1.5, 1.0)
    0.5
    """
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else float("inf")
