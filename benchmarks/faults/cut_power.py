"""Cut the power at every file operation of a save, on an ext4 image: is the old or the new checkpoint there, whole?

sudo python -m benchmarks.faults.cut_power --out FILE
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from benchmarks.faults.in_memory import memory_directory
from benchmarks.faults.report import run_rows
from tests.faults.checkpoint_saves import (
    NEXT_STEP,
    OLD_STEP,
    SCENARIOS,
    At,
    Version,
    assert_whole,
    run_save,
    save_alone,
)
from tests.faults.cut_disk import CutDisk

from meshwright.checkpoint.store import Store
from meshwright.errors import MeshwrightError

_ROWS = 3000  # so that a file has many blocks
_OLD = Version(OLD_STEP, rows=_ROWS)
_DISTURBANCES = ("alone", "fsync", "writeback")
_RECORD_BYTES = 64
_read, _write, _close, _fsync = os.read, os.write, os.close, os.fsync


class Turnstile:
    """Ranks do one operation at a time, all of them together, and stop at each until the parent has looked at the disk.

    Args:
        world: How many ranks there are [count].
    """

    def __init__(self, world: int) -> None:
        self._asked, self._ask = os.pipe()
        self._ways = [os.pipe() for _ in range(world)]
        self._is_rank = False

    def at(self, rank: int, number: int, operation: str, when: str) -> None:
        """Stop here; in a rank's process."""
        if not self._is_rank:
            self._is_rank = True
            for _, let_go in self._ways:
                _close(let_go)  # so that a rank sees the parent's end
        _write(self._ask, f"{rank} {operation or 'end'} {when}".ljust(_RECORD_BYTES).encode())
        if not _read(self._ways[rank][0], 1):
            os._exit(3)

    def stops(self) -> Iterator[tuple[int, str, str]]:
        """Yield (rank, operation, when) of each stop, while no rank is within an operation; let it go on; in the parent."""
        os.close(self._ask)
        waiting: list[tuple[int, str, str]] = []
        busy: int | None = None
        while record := _read(self._asked, _RECORD_BYTES):
            rank, operation, when = record.decode().split()
            waiting.append((int(rank), operation, when))
            # The rank within an operation goes first, to its middle and its end; then the others, in their turn.
            while ready := [stop for stop in waiting if busy in (None, stop[0])]:
                stop = ready[0]
                waiting.remove(stop)
                if stop[2] != "after":  # before the next one is the same instant
                    yield stop
                busy = stop[0] if stop[2] in ("before", "middle") else None
                _write(self._ways[stop[0]][1], b"g")
        for descriptor in (self._asked, *(end for way in self._ways for end in way)):
            os.close(descriptor)


def without_fsync(at: At, kind: str) -> At:
    """Return `at` for ranks that leave out the fsync of files or of directories: a save that is known to be wrong."""

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_directory != (kind == "directories"):
            _fsync(descriptor)

    def patched(rank: int, number: int, operation: str, when: str) -> None:
        if number == 0:
            os.fsync = fsync
        at(rank, number, operation, when)

    return patched


def check(image_root: Path, new: Version, had_old: bool, is_done: bool) -> str:
    """Return what a disk holds after a cut; raise AssertionError where that must not be."""
    store, found = Store(image_root), "nothing"
    if had_old or is_done or store.saved():
        snapshot, skipped = store.newest()
        with snapshot:
            version = assert_whole(snapshot)
        assert not skipped, f"skipped: {skipped}"
        assert version in (_OLD, new), f"mixed: {version}"
        assert version == new or not is_done, "the old one after the commit"
        found = "new" if version == new else "old"
    save_alone(image_root, Version(NEXT_STEP))
    store.clear_leftovers()
    with store.newest()[0] as snapshot:
        assert assert_whole(snapshot) == Version(NEXT_STEP)
    return found


def one(
    scenario: str,
    world: int,
    meanwhile: str,
    *,
    options: str = "",
    num_mixed: int = 2,
    seed: int = 0,
    left_out: str = "",
) -> dict[str, Any]:
    """Save once, stopped at each operation; cut the power at each stop.

    Args:
        scenario: A key of `SCENARIOS`.
        world: How many ranks save [count].
        meanwhile: What happens at each stop before the cut: `CutDisk.disturb`, or "any" for a random one of these.
        options: Options of the mount.
        num_mixed: Random choices of unflushed blocks at each stop [count].
        seed: Of what is random.
        left_out: The fsync that is left out, of "files" or "directories": a control.
    """
    new = Version(SCENARIOS[scenario], 2 if SCENARIOS[scenario] == OLD_STEP else 1, _ROWS)
    source, found, kinds = random.Random(seed), Counter[str](), Counter[str]()
    failures: list[str] = []
    instants = [0]
    seen: set[tuple[bytes, bool]] = set()
    with (
        memory_directory() as directory,
        CutDisk(Path(directory), options) as disk,
    ):
        root = disk.path / "checkpoints"
        if scenario != "first":
            save_alone(root, _OLD, world)
        os.sync()
        turnstile = Turnstile(world)

        def look() -> None:
            is_done = False
            for rank, operation, when in turnstile.stops():
                instants[0] += 1
                is_done |= when == "done" and not rank
                disk.disturb(source.choice(_DISTURBANCES) if meanwhile == "any" else meanwhile)
                for kind, image in disk.images_after_a_cut(num_mixed, source):
                    key = xxhash.xxh3_128_digest(image), is_done
                    if key in seen:
                        continue
                    seen.add(key)
                    kinds[kind] += 1
                    try:
                        with disk.mounted(image) as place:
                            found[check(place / "checkpoints", new, scenario != "first", is_done)] += 1
                    except (AssertionError, OSError, MeshwrightError) as error:
                        failures.append(f"{kind}, rank {rank}, {when} {operation}: {error}")

        at = without_fsync(turnstile.at, left_out) if left_out else turnstile.at
        outcome = run_save(root, new, world, at, 1 if scenario == "with retention" else None, look)
        if any(outcome.statuses):
            failures.append(f"the save itself: {outcome}")
    return {
        "scenario": scenario,
        "world": world,
        "meanwhile": meanwhile,
        "seed": seed,
        "mount": options or "data=ordered",
        "left_out": left_out,
        "instants": instants[0],
        "cuts": sum(kinds.values()),
        "kinds": dict(kinds),
        "found": dict(found),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks")
    parser.add_argument("--seeds", type=int, default=2, help="saves with a random disturbance at each stop")
    parser.add_argument("--mount", default="", help="options of the mount, data=writeback for example")
    parser.add_argument("--controls", action="store_true", help="saves that leave out a sync, which must be found out")
    parser.add_argument("--out", type=Path, help="results; rows that it has already are not run again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that nothing stays mounted
    turns = [*((each, 0) for each in _DISTURBANCES), *(("any", seed) for seed in range(options.seeds))]
    cases = [
        (
            f"{scenario}, {world} ranks, {meanwhile}, seed {seed}",
            functools.partial(one, scenario, world, meanwhile, options=options.mount, seed=seed),
        )
        for world, scenario, (meanwhile, seed) in itertools.product(
            map(int, options.worlds.split(",")), SCENARIOS, turns
        )
    ]
    wrong = [
        (
            f"without fsync of {kind}",
            functools.partial(one, "the same step", 1, meanwhile, options=options.mount, left_out=kind),
        )
        for kind, meanwhile in (("files", "fsync"), ("directories", "alone"))
    ]
    if options.controls:
        found = run_rows(wrong, options.out, ("cuts", "failures"))
        return 0 if all(row["failures"] for row in found["rows"].values()) else 1
    return 1 if run_rows(cases, options.out, ("instants", "cuts", "failures"))["totals"]["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
