"""Training beside saves whose every operation on files is delayed at random, so that ranks and threads meet in rare orders.

Ranks import it. What is saved is compared, bit for bit, with copies of what each rank held when the save began.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.parity.jobs import checkpoint_jobs as jobs

import meshwright as mw
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint, step_and_epoch
from meshwright.layout import ShardLayout
from meshwright.run.checkpoints import live_share
from meshwright.run.checkpoints.stored_parts import collect, place_of

OPERATIONS = ("open", "write", "fsync", "close", "rename", "unlink", "mkdir", "rmdir", "scandir", "stat")
LONGEST_S = 0.02
_DELAYED = ("meshwright.checkpoint", "shutil", "pathlib")

Parts = dict[str, tuple[ShardLayout, tuple[int, ...], torch.Tensor]]


class Disk:
    """Operations on files that take some time, and fail once where asked for.

    Args:
        source: Random numbers of this rank.
        fails_at: At which operation on a file of a save that is under way the disk is full; -1: never.
    """

    def __init__(self, source: random.Random, fails_at: int = -1) -> None:
        self._source = source
        self._left = fails_at
        self.has_failed = False

    def wait(self) -> None:
        """Wait for a random time, mostly for none."""
        drawn = self._source.random()
        if drawn < 0.3:
            time.sleep(self._source.uniform(0.0, LONGEST_S if drawn < 0.06 else LONGEST_S / 20))

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run an operation with time before and after it."""
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_DELAYED):
            return function(*args, **options)
        self.wait()
        if self._left >= 0 and function.__name__ in ("open", "write", "fsync", "rename") and _is_written(*args):
            self._left -= 1
            if self._left < 0:
                self.has_failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            return function(*args, **options)
        finally:
            self.wait()

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Delay all operations inside the context."""
        with contextlib.ExitStack() as patches:
            for name in OPERATIONS:
                own = getattr(os, name)
                patches.enter_context(
                    mock.patch.object(os, name, functools.wraps(own)(functools.partial(self.run, own)))
                )
            yield


def _is_written(first: Any, *_: Any) -> bool:
    return isinstance(first, int) or ".draft-" in str(first)


def held(model: mw.ParallelModel) -> Parts:
    """Return copies of all that this rank would save."""
    with model.engine.switch.plain():
        place = place_of(model.plan, model.world.rank)
        state = collect(model.engine, model.engine.held_state(), model.optimizer, place, model.world.rank)
        return {part.name: (part.layout, part.order, part.tensor.detach().clone()) for part in state.parts}


def differences(found: Callable[[str, ShardLayout, tuple[int, ...]], torch.Tensor], expected: Parts) -> list[str]:
    """Return the names of what is not equal, bit for bit."""
    wrong = []
    for name, (layout, order, tensor) in expected.items():
        mine = found(name, layout, order).reshape(-1).contiguous().view(torch.uint8)
        if not torch.equal(mine, tensor.reshape(-1).contiguous().view(torch.uint8)):
            wrong.append(name)
    return wrong


class Delayed:
    """One run on one rank, whose saves are delayed."""

    def __init__(self, plan: str, directory: str, seed: int, *, fails: bool) -> None:
        self.model = jobs.apply(plan, "words", "adamw", is_prepared=True)
        rank, num_ranks = self.model.world.rank, self.model.world.world_size
        self.directory, self.choices = Path(directory), random.Random(seed)
        self.failing = random.Random(seed + 1).randrange(num_ranks) if fails else -1
        at = random.Random(seed + 2).randrange(40) if rank == self.failing else -1
        self.disk = Disk(random.Random(1000 * seed + rank), at)
        self.saved: dict[tuple[int, int], Parts] = {}
        self.num_saves = self.num_loads = 0
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self._under_way: tuple[int, int] | None = None

    def train(self, num_steps: int) -> None:
        """Train, and save, wait, load and look at random."""
        number = 0
        while number < num_steps:
            number += 1
            with self.catching():
                self.model.step(mw.split_batch(jobs.batch("words", number), self.model))
            for _ in range(self.choices.choice([0, 1, 1, 1, 2])):
                self.save(number)
            drawn = self.choices.random()
            if drawn < 0.1:
                with self.catching():
                    mw.wait_for_checkpoint(self.model)
            elif drawn < 0.2 and self.saved:
                self.load()
            elif drawn < 0.3:
                with self.model.whole_parameters():
                    self.model.module.get_parameter("tokens.weight").data.mul_(1.01)
        with self.catching():
            mw.wait_for_checkpoint(self.model)

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Note the error of a save."""
        try:
            yield
        except (mw.StorageError, mw.CheckpointError) as error:
            self.errors.append(error.message)
            self.saved.pop(self._under_way or (-1, -1), None)
        self._under_way = None if self.model.saving is None else self._under_way

    def save(self, step: int) -> None:
        """Save, in the background or not."""
        in_background, keep = self.choices.random() < 0.8, self.choices.choice([None, None, None, 2])
        expected = held(self.model)
        self.num_saves += 1
        with self.catching():
            mw.wait_for_checkpoint(self.model)
        with self.catching():
            self._under_way = (step, 0)
            path = mw.save_checkpoint(self.model, self.directory, step=step, keep=keep, in_background=in_background)
            self._under_way = step_and_epoch(path.name)
            assert self._under_way is not None
            self.saved[self._under_way] = expected

    def load(self) -> None:
        """Load the newest, and compare."""
        self.num_loads += 1
        before = set(self.saved)
        with self.catching():
            try:
                mw.load_checkpoint(self.model, self.directory)
            except mw.CheckpointError as error:
                if "no sound checkpoint" in error.message and self.failing >= 0:
                    return
                raise
            newest = max(self.saved, default=(-1, -1))
            now = held(self.model)
            expected = {
                name: part for name, part in self.saved.get(newest, {}).items() if not name.startswith("random")
            }
            wrong = differences(lambda name, *_: now[name][2], expected)
            self.wrong += [f"loaded of {newest} of {sorted(before)}: {wrong[:3]}"] if wrong or not expected else []

    def check(self) -> None:
        """Compare what is there with what was to be saved, and look for what was left behind."""
        for path in sorted(self.directory.iterdir()):
            place = step_and_epoch(path.name)
            if place is None:
                self.wrong.append(f"left behind: {path.name} with {sorted(os.listdir(path))}")
                continue
            notes = [name for name in os.listdir(path) if name.startswith("note")]
            if notes or place not in self.saved:
                self.wrong.append(f"{path.name} has notes {notes}, was saved: {place in self.saved}")
                continue
            with OpenCheckpoint(path) as snapshot:
                snapshot.check()
                wrong = differences(snapshot.read, self.saved[place])
                self.wrong += [f"{path.name} differs: {wrong[:3]}"] if wrong else []


def run(plan: str, directory: str, seed: int, num_steps: int, *, fails: bool = False) -> dict[str, Any]:
    """Train beside delayed saves, and return what this rank has found."""
    interval = sys.getswitchinterval()
    with mock.patch.object(live_share, "LEAST_BYTES", 1), mock.patch.object(live_share, "PIECE_BYTES", 512):
        one = Delayed(plan, directory, seed, fails=fails)
        sys.setswitchinterval(1e-5)
        try:
            with one.disk.slow():
                one.train(num_steps)
            one.check()
        finally:
            sys.setswitchinterval(interval)
            one.model.close()
    return {
        "saves": one.num_saves,
        "loads": one.num_loads,
        "failed": one.disk.has_failed,
        "errors": one.errors,
        "wrong": one.wrong,
    }
