"""Reader of DeepSpeed configurations: every key is honoured, or refused with a fix; none is dropped in silence.

    text --parse_text--> object --flatten--> dotted keys --take_*--> Plan + changes of the configuration + a row for each key

`keys.py` is the table of keys, `text.py` accepts more than JSON. docs/deepspeed.md is for users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.check import flatten
from meshwright.plan.deepspeed.draft import Draft, Row, Settings
from meshwright.plan.deepspeed.parallelism import take_layout
from meshwright.plan.deepspeed.text import is_saved_value, parse_text
from meshwright.plan.deepspeed.training import take_loop, take_optimizer, take_precision, take_scheduler
from meshwright.plan.deepspeed.zero import take_recompute, take_zero
from meshwright.spec.plan import Plan
from meshwright.values import FrozenMap, Problems, Value

__all__ = ["Resolution", "Row", "Settings", "is_saved_value", "parse_text", "read_deepspeed"]

COLUMNS = ("key", "given", "resolved", "why")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution(Value):
    """Result of reading a DeepSpeed configuration.

    Args:
        name: The file's name.
        plan: The plan.
        changes: Section of the training's configuration -> key -> the value that the file gives it.
        rows: How each key was read, in the file's order; then those that are not in it and decide something.
    """

    FORMAT: ClassVar[str] = "deepspeed_resolution"

    name: str
    plan: Plan
    changes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=FrozenMap[Mapping[str, Any]])
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()


def read_deepspeed(
    entries: Mapping[str, Any],
    *,
    name: str = "ds_config.json",
    settings: Settings | None = None,
    num_devices: int | None = None,
    available: int = 1,
    devices_from: str = "this machine",
) -> Resolution:
    """Return the plan and the training that a DeepSpeed configuration asks for.

    What the file leaves out stays as the training's configuration has it; "auto" takes it from there too, then from the
    rules of transformers and accelerate, then DeepSpeed's default. Clipping is on, at DeepSpeed's default of 1, unless
    somebody says otherwise.

    Args:
        entries: The file's object, from `parse_text`.
        name: The file's name, for errors.
        settings: Values of the training's configuration.
        num_devices: The devices that must be used; None: as many as the batch numbers say, else up to `available` [count].
        available: The devices that there are [count].
        devices_from: Where the number of devices comes from, for the table.

    Returns:
        The plan, what changes in the configuration, and a row for each key.

    Raises:
        ConfigError: Keys are unknown, contradict each other or cannot be honoured; all of them are reported at once, each with a
            part of the file to paste, or a key to leave out, as its fix.

    Source:
        deepspeed 0.19.8, `runtime/config.py` and what it calls.

    >>> resolution = read_deepspeed({"train_batch_size": 64, "zero_optimization": {"stage": 2}}, num_devices=2)
    >>> str(resolution.plan)
    'dp=2,zero=2,overlap=off,micro_batch_size=32'
    """
    problems = Problems(name)
    values = flatten(entries, problems)
    if not values and not problems:
        raise ConfigError(
            f"{name}: there is no key of a DeepSpeed configuration in it, nor the format of a saved plan",
            fix='a plan\'s line, as in "dp=2", a plan that Meshwright saved, or a DeepSpeed configuration',
        )
    draft = Draft(values, settings or Settings(), problems)
    take_layout(draft, num_devices=num_devices, available=available, devices_from=devices_from)
    take_zero(draft)
    take_recompute(draft)
    take_precision(draft)
    take_loop(draft)
    take_optimizer(draft)
    take_scheduler(draft)
    draft.add_hints()
    problems.check()
    plan = Plan(**draft.plan, reasons=(f"read from the DeepSpeed configuration {name}",))
    return Resolution(name=name, plan=plan, changes=draft.changes, rows=draft.sorted_rows())
