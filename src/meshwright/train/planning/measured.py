"""Plans that were run for one training on this host: what their steps took is kept, so that "auto" takes the fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Sequence
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.kept_files import keep_file, read_kept_file
from meshwright.spec.plan import Plan
from meshwright.train.planning.config_model import Described
from meshwright.train.planning.this_machine import kept_file
from meshwright.units import format_seconds

__all__: list[str] = []

_FORMAT: Final = 1
_MOST_NAMED: Final = 3
"""Other plans that a reason names [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was run for a few steps beside others."""

    plan: Plan
    step_s: float
    """Median over the turns of the median step [s]."""
    day: str
    """When, as "2026-11-27"."""
    turns: int
    """How often each plan was run, one after another [count]."""


def keep_measured(known: Described, num_devices: int, ran: Sequence[MeasuredPlan]) -> None:
    """Keep plans of a training that ran, the fastest first, in place of what was kept of it; nothing where that cannot be."""
    path = kept_file("plans", *_training(known, num_devices))
    if path is None:
        return
    rows = [{"plan": str(one.plan), "step_s": one.step_s, "day": one.day, "turns": one.turns} for one in ran]
    with contextlib.suppress(OSError):
        keep_file(path, json.dumps(rows, indent=1).encode())


def measured_plans(known: Described, num_devices: int) -> list[MeasuredPlan]:
    """Return the plans of a training that ran here, the fastest first; none where nothing is kept that can be read."""
    path = kept_file("plans", *_training(known, num_devices))
    if path is None:
        return []
    with contextlib.suppress(ConfigError, OSError, ValueError, TypeError, KeyError):
        return [_read(row) for row in json.loads(read_kept_file(path))]
    return []


def today() -> str:
    """Return the day as `MeasuredPlan` has it."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def reason_for(one: MeasuredPlan, ran: Sequence[MeasuredPlan]) -> str:
    """Say where a plan stands among those that ran."""
    others = [other for other in ran if other is not one]
    named = ", ".join(f"'{other.plan}' {format_seconds(other.step_s)}" for other in others[:_MOST_NAMED])
    beside = f"; beside it {named}" if named else ""
    times = "once" if one.turns == 1 else f"{one.turns} times, in turns"
    return f"{format_seconds(one.step_s)} a step measured on {one.day} ({times}){beside}"


def _training(known: Described, num_devices: int) -> tuple[object, ...]:
    return _FORMAT, known.model.to_json(), known.train.to_json(), num_devices


def _read(row: dict[str, Any]) -> MeasuredPlan:
    return MeasuredPlan(Plan.parse(row["plan"]), float(row["step_s"]), str(row["day"]), int(row["turns"]))
