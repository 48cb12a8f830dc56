"""The command `meshwright checkpoint inspect`: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.durable import read_small_file, told_of
from meshwright.checkpoint.manifest import ITEM_BYTES, MOST_BYTES, Manifest
from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE
from meshwright.checkpoint.step_directories import find_steps, refuse_other_name
from meshwright.errors import some_of
from meshwright.units import format_bytes

__all__: list[str] = []

_MOST_ROWS = 20
_MOST_TEXT = 60


def printable(text: object) -> str:
    r"""Return text that cannot steer a terminal: names in a file may come from anywhere.

    >>> printable("model/w"), printable("a\x1b[31mb")
    ('model/w', "'a\\x1b[31mb'")
    """
    plain = str(text)
    return plain if plain.isprintable() else repr(plain)


def inspect_checkpoint(
    path: Path, *, step: int | None = None, json_path: Path | None = None, show_all: bool = False
) -> int:
    """Show what a checkpoint holds. Its files of tensors are not opened.

    Args:
        path: One step's directory, a directory of steps (the newest is shown), or a run's directory.
        step: This step of them.
        json_path: File for everything that is shown, uncut, with the state's values.
        show_all: Whether long lists are shown whole.

    Returns:
        The exit code, 0.

    Raises:
        CheckpointError: There is none, or its manifest is damaged.
        StorageError: It cannot be read, or the JSON file cannot be written.
    """
    steps = find_steps(path, step)
    where = steps[0] / MANIFEST_FILE
    manifest = Manifest.from_bytes(read_small_file(where, MOST_BYTES), str(where))
    if steps[0] != path:
        refuse_other_name(steps[0], manifest)
    most = None if show_all else _MOST_ROWS
    sys.stdout.write("\n".join([*_head(steps, manifest), *_files(steps[0], manifest, most), *_tensors(manifest, most)]))
    sys.stdout.write("\n")
    if json_path is not None:
        with told_of(json_path, "write"):
            json_path.write_text(json.dumps(_to_json(steps[0], manifest), indent=1) + "\n", encoding="utf-8")
    return 0


def _head(steps: Sequence[Path], manifest: Manifest) -> list[str]:
    entries = manifest.tensors.values()
    size = sum(math.prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in entries)
    rows = [
        ("checkpoint", printable(steps[0])),
        ("step", f"{manifest.step}" + (f", saved {manifest.epoch} times" if manifest.epoch > 1 else "")),
        ("plan", printable(manifest.plan)),
        ("tensors", f"{len(manifest.tensors)}, {format_bytes(size)}"),
        *(("", f"{printable(group)}/ {count}, {format_bytes(size)}") for group, count, size in _groups(manifest)),
        (
            "tied names",
            ", ".join(f"{printable(a)} = {printable(b)}" for a, b in _first(manifest.aliases.items(), 5)) or "none",
        ),
        ("state", "; ".join(_state(manifest)) or "none"),
    ]
    if len(steps) > 1:
        rows.insert(1, ("older", some_of([older.name for older in steps[1:]], 8)))
    return [f"{name:<12}{text}" for name, text in rows]


def _first(items: Iterable[Any], most: int) -> list[Any]:
    return [item for item, _ in zip(items, range(most), strict=False)]


def _groups(manifest: Manifest) -> list[tuple[str, int, int]]:
    """Return (first part of the names, number of tensors, bytes)."""
    found: dict[str, tuple[int, int]] = {}
    for name, entry in manifest.tensors.items():
        group = name.partition("/")[0]
        count, size = found.get(group, (0, 0))
        found[group] = count + 1, size + math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    return [(group, count, size) for group, (count, size) in _first(found.items(), 10)]


def _state(manifest: Manifest) -> list[str]:
    """Return the state's keys, with what is in them where that is short."""
    texts = []
    for key, value in manifest.state.items():
        if isinstance(value, dict):
            text = some_of([str(name)[:_MOST_TEXT] for name in value], 6)
        else:
            text = f"{len(value)} entries" if isinstance(value, list) else str(value)[:_MOST_TEXT]
        texts.append(printable(f"{key}: {text}" if text else key))
    return texts


def _files(path: Path, manifest: Manifest, most: int | None) -> list[str]:
    rows = []
    for file in manifest.files[:most]:
        with told_of(path / file.name, "read"):
            size = os.lstat(path / file.name).st_size if os.path.lexists(path / file.name) else None
        remark = "  MISSING" if size is None else f"  DAMAGED: {size} bytes" if size != file.num_bytes else ""
        rows.append((file.name, format_bytes(file.num_bytes) + remark))
    return ["", *_table([("file", "size"), *rows]), *_cut(len(manifest.files), len(rows), "files")]


def _tensors(manifest: Manifest, most: int | None) -> list[str]:
    shown = list(manifest.tensors.items())[:most]
    rows = [(printable(name), entry.dtype, str(list(entry.full_shape)), str(len(entry.parts))) for name, entry in shown]
    head = ("tensor", "type", "shape", "parts")
    return ["", *_table([head, *rows]), *_cut(len(manifest.tensors), len(rows), "tensors")]


def _cut(total: int, shown: int, what: str) -> list[str]:
    return [f"... {total - shown} more {what} (--all shows them)"] if total > shown else []


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _to_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "plan": manifest.plan,
        "files": [{"name": file.name, "bytes": file.num_bytes} for file in manifest.files],
        "tensors": [
            {
                "name": name,
                "dtype": entry.dtype,
                "shape": list(entry.full_shape),
                "stored_order": list(entry.order),
                "parts": [
                    {"file": manifest.files[part.file].name, "offset": part.offset, **_layout(part.layout)}
                    for part in entry.parts
                ],
            }
            for name, entry in manifest.tensors.items()
        ],
        "aliases": dict(manifest.aliases),
        "state": dict(manifest.state),
    }


def _layout(layout: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(layout).items() if name != "shape"}
