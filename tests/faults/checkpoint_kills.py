"""One kill during a save, and what must hold afterwards: the old state or the new one, whole, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults.checkpoint_saves import (
    NEXT_STEP,
    OLD_STEP,
    SCENARIOS,
    Outcome,
    Version,
    assert_whole,
    run_save,
    save_alone,
)

from meshwright.checkpoint.store import Store
from meshwright.errors import CheckpointError

OLD = Version(OLD_STEP)


class Kill(NamedTuple):
    """One instant: a rank's n-th operation on files, and whether before, in or after it."""

    rank: int
    number: int
    when: str


class Killed(NamedTuple):
    """What one kill left."""

    found: str
    """"old", "new" or "nothing"."""
    operation: str
    """The operation that was hit; empty if the save came to its end before."""
    outcome: Outcome


class KilledSave:
    """Saves of one scenario, killed at one instant after the other.

    Args:
        directory: An empty directory.
        scenario: A key of `SCENARIOS`.
        world: How many ranks save [count].
    """

    def __init__(self, directory: Path, scenario: str, world: int) -> None:
        self.world = world
        self.new = Version(SCENARIOS[scenario], 2 if SCENARIOS[scenario] == OLD_STEP else 1)
        self.keep = 1 if scenario == "with retention" else None
        self.had_old = scenario != "first"
        self._root, self._base = directory / "now", directory / "base"
        if self.had_old:
            save_alone(self._base, OLD, world)

    def kill(self, kill: Kill | None) -> Killed:
        """Save, with a rank killed or without, and check."""
        shutil.rmtree(self._root, ignore_errors=True)
        if self.had_old:
            shutil.copytree(self._base, self._root)
        told, telling = os.pipe()
        write = os.write  # as it is now: it will be watched, too

        def at(rank: int, number: int, operation: str, when: str) -> None:
            if kill == (rank, number, when):
                write(telling, operation.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        outcome = run_save(self._root, self.new, self.world, at, self.keep)
        os.close(telling)
        operation = os.read(told, 100).decode()
        os.close(told)
        assert all(status in (0, 3, -signal.SIGKILL) for status in outcome.statuses), outcome
        found = self._check(outcome)
        self._check_next()
        return Killed(found, operation, outcome)

    def _check(self, outcome: Outcome) -> str:
        store = Store(self._root)
        try:
            snapshot, skipped = store.newest()
        except CheckpointError:
            assert not self.had_old, f"nothing is left: {outcome}"
            assert not outcome.is_committed, f"nothing is there after a save that ended well: {outcome}"
            assert not store.saved(), "something has a name and is not whole"
            return "nothing"
        with snapshot:
            assert not skipped, f"something has a name and is not whole: {skipped}"
            version = assert_whole(snapshot)
        assert version in (OLD, self.new)
        assert version == self.new or not outcome.is_committed, f"the old one after a save that ended well: {outcome}"
        if self.had_old and self.keep is None:
            names = [saved.path.name for saved in store.saved()]
            assert names[-1] == f"step-{OLD_STEP:08d}", f"the old one is gone: {names}"
        return "new" if version == self.new else "old"

    def _check_next(self) -> None:
        """Whatever has been left there: the next save is sound, and the leftovers go."""
        store, version = Store(self._root), Version(NEXT_STEP)
        save_alone(self._root, version, self.world)
        store.clear_leftovers()
        names = [path.name for path in self._root.iterdir()]
        assert all(name.startswith("step-") for name in names), names
        with store.newest()[0] as snapshot:
            assert assert_whole(snapshot) == version

    def instants(self, rank: int) -> Iterator[tuple[Kill, Killed]]:
        """Kill a rank before, in and after each of its operations, until a save comes to its end first."""
        for number in range(1000):
            hit = False
            for when in ("before", "middle", "after"):
                kill = Kill(rank, number, when)
                killed = self.kill(kill)
                if killed.operation:
                    hit = True
                    yield kill, killed
            if not hit:
                return
        raise AssertionError("a save has more than 1,000 operations")
