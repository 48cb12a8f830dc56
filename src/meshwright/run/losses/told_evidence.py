"""Evidence of the trials of a loss, told to all ranks as JSON, by which all decide alike."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.apply.engine import Engine
from meshwright.run.losses.trials import Evidence
from meshwright.run.losses.weights import Counted

__all__: list[str] = []

_LARGEST = 1e300
"""What stands for infinity, which JSON does not have."""


def seen_by_all(engine: Engine, evidence: Evidence | None) -> list[tuple[int, Evidence]]:
    """Return (rank, evidence) of the ranks that have any; every rank calls it."""
    told = engine.everyone.all_gather_json(None if evidence is None else _to_json(evidence), device=engine.device)
    return [(engine.everyone.ranks[place], _from_json(entry)) for place, entry in enumerate(told) if entry is not None]


def _to_json(evidence: Evidence) -> dict[str, Any]:
    def number(gap: float | None) -> float | None:
        return None if gap is None else min(gap, _LARGEST)

    fields = {field.name: getattr(evidence, field.name) for field in dataclasses.fields(evidence)}
    fields["gaps"] = [
        [[None if c.path is None else list(c.path), c.shifted, c.ignored], number(gap), [number(g) for g in gaps]]
        for c, gap, gaps in evidence.gaps
    ]
    fields["masked"] = [[list(path), value, each, is_safe] for path, value, each, is_safe in evidence.masked]
    return fields


def _from_json(fields: dict[str, Any]) -> Evidence:
    def counted(row: list[Any]) -> Counted:
        return Counted(None if row[0] is None else tuple(row[0]), row[1], row[2])

    gaps = [(counted(row), gap, masked) for row, gap, masked in fields["gaps"]]
    masked = [(tuple(path), value, each, is_safe) for path, value, each, is_safe in fields["masked"]]
    return Evidence(**{**fields, "gaps": gaps, "masked": masked})
