"""DeepSpeed configuration merged into the training's own: values for "auto", precedence, and the table of keys.

If both set a key, the DeepSpeed file's value holds, since the user asked for that file; the table names the replaced value. Only
`--set` has the same rank, and a contradiction with it is an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from meshwright.errors import ConfigError
from meshwright.plan.deepspeed.reader import COLUMNS, Resolution, Settings
from meshwright.ranks.environment import read_place
from meshwright.texts import clean, is_directory, parse_json, read_text
from meshwright.train.config.types import MOST_COUNT

__all__: list[str] = []

PlanRow = tuple[str, str, str, str]
"""Key, given, resolved, why."""


def rows_of(resolution: Resolution, sections: Mapping[str, Any]) -> tuple[PlanRow, ...]:
    """Return the table's rows, with what the file replaces in the configuration."""
    rows: list[PlanRow] = [(row.key, row.given, row.resolved, row.why) for row in resolution.rows]
    for section, entries in resolution.changes.items():
        for key, value in entries.items():
            before = _table(sections, section).get(key)
            if before is not None and _differs(before, value):
                rows.append((f"{section}.{key}", "-", _show(value), f"replaces {_show(before)} of the configuration"))
    return tuple(rows)


def apply_changes(
    tables: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], overrides: Sequence[str], name: str
) -> None:
    """Put what a DeepSpeed configuration says into the training's tables.

    Raises:
        ConfigError: `--set` says otherwise.
    """
    set_keys = {override.partition("=")[0].strip() for override in overrides}
    for section, entries in changes.items():
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            continue  # the type is about to be complained about
        for key, value in entries.items():
            dotted = f"{section}.{key}"
            was_set = [key for key in set_keys if key == dotted or key.startswith(f"{dotted}.")]
            if was_set and _differs(table.get(key), value):
                raise ConfigError(
                    f"{name} says {dotted} = {_show(value)}, and --set says {_show(table.get(key))} (rule: one of them)",
                    fix=f"leave out --set {was_set[0]}",
                )
            table[key] = value


def require_same_training(
    name: str, changes: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Any]
) -> str | None:
    """Check that a plan of a comparison leaves the training as it is: all of its plans train the same.

    Returns:
        A line on what the DeepSpeed configuration says otherwise and is left aside, or None.

    Raises:
        ConfigError: It is for another global batch, without which its plan is another one.
    """
    others: list[str] = []
    for section, entries in changes.items():
        for key, value in entries.items():
            here = _table(sections, section).get(key)
            if not _differs(here, value) or key == "print_every":
                continue
            if key == "global_batch_size":
                raise ConfigError(
                    f"{name} is for train.global_batch_size = {value}, the configuration says {here} (rule: a comparison trains "
                    "the same under every plan)",
                    fix=f"--set train.{key}={value}",
                )
            others.append(f"{section}.{key} = {_show(value)}")
    if not others:
        return None
    return f"warning: every plan trains as the configuration says; {name} would set {', '.join(others)}"


def show_rows(rows: Sequence[PlanRow], stream: TextIO) -> None:
    """Show the table: framed on a terminal, a line for each key elsewhere. Only a job's first rank shows it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if not rows or read_place(os.environ).rank != 0:
        return
    cells = [tuple(clean(cell) for cell in row) for row in rows]
    console = Console(file=stream, highlight=False)
    if console.is_terminal:
        table = Table(*COLUMNS)
        for row in cells:
            style = "yellow" if row[-1].startswith("warning:") else None
            table.add_row(*(escape(cell) for cell in row), style=style)
        console.print(table)
        return
    widths = [max(len(line[column]) for line in (COLUMNS, *cells)) for column in range(len(COLUMNS) - 1)]
    for line in (COLUMNS, *cells):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        stream.write("  ".join([*padded, line[-1]]) + "\n")
    stream.flush()


def settings_of(sections: Mapping[str, Any], base: Path) -> Settings:
    """Return what a training's configuration says, read and not checked yet, where a DeepSpeed file leaves it open."""
    train, optimizer = _table(sections, "train"), _table(sections, "optimizer")
    betas = optimizer.get("betas")
    numbers = isinstance(betas, (list, tuple)) and all(isinstance(beta, float) for beta in betas)
    precision = train.get("precision")
    return Settings(
        global_batch_size=_whole(train.get("global_batch_size")),
        micro_batches=_whole(train.get("micro_batches")),
        max_grad_norm=_number(train.get("max_grad_norm")),
        precision=precision if precision in ("fp32", "bf16") else None,
        lr=_number(optimizer.get("lr")),
        weight_decay=_number(optimizer.get("weight_decay")),
        betas=tuple(betas) if numbers and betas else None,
        steps=_whole(train.get("steps")),
        warmup_steps=_whole(_table(sections, "schedule").get("warmup_steps")),
        hidden_size=_hidden_size(_table(sections, "model"), base),
    )


def _hidden_size(model: Mapping[str, Any], base: Path) -> int | None:
    """Return the model's width, where it is named: in its arguments, or in its Hugging Face configuration."""
    named = _whole(_table(model, "kwargs").get("hidden_size"))
    target = model.get("target")
    if named is not None or not isinstance(target, str) or not target.startswith("hf:"):
        return named
    path = base / target.removeprefix("hf:")
    try:
        config = parse_json(read_text(path / "config.json" if is_directory(path) else path))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        return None  # complained about with the model's own rule
    sizes = config.get("hidden_sizes")
    widest = max((size for size in sizes if isinstance(size, int)), default=None) if isinstance(sizes, list) else None
    return _whole(config.get("hidden_size")) or widest


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tables.get(name)
    return table if isinstance(table, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNT else None


def _number(value: Any) -> float | None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    return float(value) if fits else None


def _differs(before: Any, after: Any) -> bool:
    return _show(before) != _show(after)


def _show(value: Any) -> str:
    # 1 and 1.0, and lists and tuples, are the same here.
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, default=str)
