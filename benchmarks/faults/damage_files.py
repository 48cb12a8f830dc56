"""Damage every bit, length and file of a small checkpoint: is each refused, with the file named?

python -m benchmarks.faults.damage_files --out FILE
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows
from tests.faults.checkpoint_damage import flipped, other_lengths, refusal, replaced
from tests.faults.checkpoint_saves import Version, save_alone


def counted(answers: Iterator[tuple[str, str | None]]) -> dict[str, Any]:
    """Return how many there were, and which were not refused as they must be."""
    count, failures = 0, []
    for what, wrong in answers:
        count += 1
        if wrong is not None:
            failures.append(f"{what}: {wrong}")
    return {"tried": count, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    with memory_directory() as directory:
        path = save_alone(Path(directory), Version(2), 2)
        older, again = save_alone(Path(directory), Version(1), 2), save_alone(Path(directory), Version(2, 2), 2)
        wider = save_alone(Path(directory), Version(3), 3)
        if refusal(path, "") != "accepted":
            raise RuntimeError("the checkpoint is refused before anything is done to it")
        cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
        for file in sorted(each.name for each in path.iterdir()):
            others = {
                f"{kind}'s {name.name}": name
                for kind, place in (("own", path), ("older", older), ("same step's", again), ("wider", wider))
                for name in sorted(place.iterdir())
                if name != path / file and name.read_bytes() != (path / file).read_bytes()
            }
            ways = {"flipped": flipped, "other lengths": other_lengths}
            cases += [(f"{file}, {way}", functools.partial(_run, run, path, file)) for way, run in ways.items()]
            cases.append((f"{file}, replaced", functools.partial(_run, replaced, path, file, others)))
        report = run_rows(cases, options.out, ("tried", "failures"))
    return 1 if report["totals"]["failures"] else 0


def _run(way: Callable[..., Iterator[tuple[str, str | None]]], path: Path, file: str, *rest: Any) -> dict[str, Any]:
    return {"bytes": (path / file).stat().st_size, **counted(way(path, file, *rest))}


if __name__ == "__main__":
    raise SystemExit(main())
