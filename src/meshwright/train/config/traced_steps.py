"""Steps that a run records: `train.trace`. Never imports torch."""

from __future__ import annotations

import re
from typing import Final

from meshwright.errors import ConfigError
from meshwright.train.config.types import TrainConfig

__all__: list[str] = []

MOST_STEPS: Final = 100
"""Steps that one trace may have: each holds every exchange of every rank [count]."""
_STEPS: Final = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")


def traced_steps(text: str | None) -> range:
    """Return the steps, counted from 1, that `train.trace` names.

    Raises:
        ConfigError: It names none.

    >>> list(traced_steps("10-12")), list(traced_steps("3")), list(traced_steps(None))
    ([10, 11, 12], [3], [])
    """
    if text is None:
        return range(0)
    match = _STEPS.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else 0
    if not 1 <= first <= last < first + MOST_STEPS:
        raise ConfigError(
            f"train.trace = {text!r} (rule: one step, counted from 1, or first-last with at most {MOST_STEPS} steps)",
            fix='train.trace = "10", or "10-12"',
        )
    return range(first, last + 1)


def check_trace(config: TrainConfig) -> None:
    """Refuse steps that the run will not take.

    Raises:
        ConfigError: `train.trace` cannot be read, or ends after the last step; or a profiler is asked for without it.
    """
    steps = traced_steps(config.train.trace)
    if config.train.profiler and not steps:
        raise ConfigError(
            "train.profiler = true without train.trace (rule: the profiler is added to traced steps)",
            fix='train.trace = "10"',
        )
    if steps and steps[-1] > config.train.steps:
        raise ConfigError(
            f"train.trace = {config.train.trace!r} and train.steps = {config.train.steps} (rule: traced steps are taken)",
            fix=f'train.trace = "{config.train.steps}"',
        )
