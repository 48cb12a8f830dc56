"""Relations that costs keep whatever their constants are, on random models, clusters and setups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3])
)  # benchmarks is a folder of the repository, not of the package

from benchmarks.planner.metamorphic import RELATIONS, broken, drawn


@pytest.mark.parametrize("first", range(0, 20, 5))
def test_a_change_whose_direction_is_known_goes_that_way(first: int) -> None:
    found = broken(range(first, first + 5))
    assert not found, f"{found[0]}: {drawn(found[0][1])}"


def test_a_relation_that_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in ("ROUNDED", "RECUT"):
        monkeypatch.setattr(f"benchmarks.planner.metamorphic.{allowed}", -0.9)
    assert {name for name, *_ in broken(range(1))} >= {"faster_links", "larger_batches"}
    assert len(RELATIONS) == 10
