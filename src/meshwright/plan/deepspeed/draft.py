"""Draft of a plan while a DeepSpeed configuration is read, shared by the modules of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.plan.deepspeed.check import AUTO, COMMENT_MARKS, show
from meshwright.plan.deepspeed.keys import BLOCKS, KEYS
from meshwright.values import Problems, Value

__all__: list[str] = []

NOTHING = "-"
"""What stands in a row where nothing is given, or nothing is to be set."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Value):
    """Values of the training's own configuration, used for "auto" and for keys that the file leaves out.

    Args:
        global_batch_size: Samples of one step [samples].
        micro_batches: Forward passes of one step on each dp rank [count].
        max_grad_norm: Global norm to clip to.
        precision: "fp32" or "bf16".
        lr: Learning rate.
        weight_decay: The optimizer's.
        betas: Of Adam.
        steps: Optimizer steps of the run [count].
        warmup_steps: Of the learning rate [count].
        hidden_size: The model's width, which DeepSpeed's users size buckets by [count].
    """

    FORMAT: ClassVar[str] = "deepspeed_settings"

    global_batch_size: int | None = None
    micro_batches: int | None = None
    max_grad_norm: float | None = None
    precision: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, ...] | None = None
    steps: int | None = None
    warmup_steps: int | None = None
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        self._check_types()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row(Value):
    """The reading of one key.

    Args:
        key: The key, dotted, or "devices".
        given: Its value in the file, as JSON; "-" where it is not there.
        resolved: What it comes to; "-" where there is nothing to set.
        why: The rule; begins with "warning:" where DeepSpeed would do something else.
    """

    FORMAT: ClassVar[str] = "deepspeed_row"

    key: str
    given: str
    resolved: str
    why: str

    def __post_init__(self) -> None:
        self._check_types()


class Draft:
    """A configuration while it is read."""

    def __init__(self, values: Mapping[str, Any], settings: Settings, problems: Problems) -> None:
        self.values = values
        self.settings = settings
        self.problems = problems
        self.plan: dict[str, Any] = {}
        """The plan's fields."""
        self.changes: dict[str, dict[str, Any]] = {}
        """Section of the configuration -> key -> value."""
        self.rows: list[Row] = []

    def has(self, key: str) -> bool:
        """Tell whether a key or a block is there, "auto" included."""
        return key in self.values

    def is_auto(self, key: str) -> bool:
        """Tell whether a key says "auto"."""
        return self.values.get(key) == AUTO

    def get(self, key: str) -> Any:
        """Return a key's value; None where it is not there, or "auto"."""
        return None if self.is_auto(key) else self.values.get(key)

    def row(self, key: str, resolved: object, why: str, *, warns: bool = False) -> None:
        """Record the reading of a key."""
        given = show(self.values[key]) if key in self.values else NOTHING
        text = resolved if isinstance(resolved, str) else show(resolved)
        self.rows.append(Row(key=key, given=given, resolved=text, why=f"warning: {why}" if warns else why))

    def source(self, key: str, setting: str | None = None) -> str:
        """Return the source of a key's value: the file, the configuration, or DeepSpeed's default.

        Args:
            key: The key.
            setting: The configuration's key that was used for it, if one was.
        """
        if self.get(key) is not None:
            return "given"
        word = "auto" if self.is_auto(key) else "not given"
        return f"{word}: {setting}" if setting else f"{word}: DeepSpeed's default"

    def change(self, section: str, **entries: Any) -> None:
        """Set keys of the training's configuration."""
        self.changes.setdefault(section, {}).update(entries)

    def add_hints(self) -> None:
        """Add the rows of keys that change no number, of disabled features, and of comments."""
        told = {row.key for row in self.rows}
        for key in self.values:
            if key in told or key in BLOCKS:
                continue
            known = KEYS.get(key)
            if known is None:
                self.row(key, NOTHING, "a comment" if key.startswith(COMMENT_MARKS) else "switched off")
            elif known.only:
                self.row(key, NOTHING, f"as it is here: {known.only}")
            else:
                self.row(key, NOTHING, f"no number changes: {known.hint}")

    def sorted_rows(self) -> tuple[Row, ...]:
        """Return the rows in the file's order, then those of keys that are not in it."""
        place = {key: index for index, key in enumerate(self.values)}
        return tuple(sorted(self.rows, key=lambda row: place.get(row.key, len(place))))
