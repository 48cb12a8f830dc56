"""A schedule drawn as text, as large as can be read."""

from __future__ import annotations

from typing import Final

from meshwright.errors import ConfigError
from meshwright.schedule.pipeline import Kind, PipelineSchedule

__all__: list[str] = []

_MOST_STAGES: Final = 64
_MOST_CELLS: Final = {"zbv": 1024}
"""Stages times micro-batches of a schedule that is drawn in a second; of other kinds 8192 [count]."""


def draw_schedule(kind: Kind, num_stages: int, num_micro_batches: int) -> str:
    """Return a schedule as text.

    Args:
        kind: The order of work.
        num_stages: Pipeline ranks [count].
        num_micro_batches: Micro-batches of one step [count].

    Raises:
        ConfigError: It is too large to be drawn.
    """
    most = _MOST_CELLS.get(kind, 8192)
    if num_stages > _MOST_STAGES or num_stages * num_micro_batches > most:
        drawn = min(num_stages, _MOST_STAGES)
        raise ConfigError(
            f"schedule: {num_stages} stages x {num_micro_batches} micro-batches of {kind} (rule: at most {_MOST_STAGES} "
            f"stages and {most} cells are drawn)",
            fix=f"--stages {drawn} --micro-batches {min(num_micro_batches, most // drawn)}",
        )
    return PipelineSchedule.build(kind, num_ranks=num_stages, num_micro_batches=num_micro_batches).draw()
