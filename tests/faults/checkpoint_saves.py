"""Saves of one small state by several processes, the way that ranks save: each writes its file, the first commits.

Every operation on files of a rank can be watched: it is counted, and something is done before it, after it or in its middle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from meshwright.checkpoint.manifest import FileEntry, Manifest, StoredPart, TensorEntry
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import SaveUnderWay, Store
from meshwright.checkpoint.tensor_files import TensorFile, dtype_name
from meshwright.errors import StorageError
from meshwright.layout import ShardLayout, even_ranges

OPERATIONS = (
    *("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir"),
    *("scandir", "stat", "posix_fallocate", "posix_fadvise", "pwrite", "writev", "ftruncate", "replace", "link"),
)
"""Functions of `os` that read or change files, and that a save may call."""

OLD_STEP, NEXT_STEP = 4, 9
SCENARIOS = {"first": 5, "another step": 5, "the same step": OLD_STEP, "with retention": 5}
"""What is saved over what -> the step that is saved."""


class Version(NamedTuple):
    """One state: a step that is saved twice has other numbers the second time."""

    step: int
    turn: int = 1
    rows: int = 12
    """Of the weight [count]."""


def state_of(version: Version) -> dict[str, torch.Tensor]:
    """Return the tensors of a version."""
    source = torch.Generator().manual_seed(1000 * version.step + version.turn)
    return {
        "model/weight": torch.randn(version.rows, 5, generator=source),
        "model/half": torch.randn(7, generator=source).to(torch.bfloat16),
        "model/count": torch.tensor(1000 * version.step + version.turn),
        "model/empty": torch.zeros(0, 4),
        "optimizer/weight/moment": torch.randn(version.rows, 5, generator=source, dtype=torch.float64),
    }


def held_by(version: Version, rank: int, world: int) -> list[tuple[str, ShardLayout, torch.Tensor]]:
    """Return what a rank writes: rows of the weight, an interval of the flattened moment, and the first rank all the rest."""
    full = state_of(version)
    (start, stop), (first, last) = even_ranges(version.rows, world)[rank], even_ranges(5 * version.rows, world)[rank]
    held = [
        (
            "model/weight",
            ShardLayout(shape=(version.rows, 5), dim=0, ranges=((start, stop),)),
            full["model/weight"][start:stop],
        ),
        (
            "optimizer/weight/moment",
            ShardLayout(shape=(version.rows, 5), flat=(first, last)),
            full["optimizer/weight/moment"].reshape(-1)[first:last],
        ),
    ]
    if not rank:
        names = ("model/half", "model/count", "model/empty")
        held += [(name, ShardLayout(shape=tuple(full[name].shape)), full[name]) for name in names]
    return held


def manifest_of(version: Version, epoch: int, files: Sequence[FileEntry]) -> Manifest:
    """Return the manifest over the files of all ranks."""
    full, parts = state_of(version), dict[str, list[StoredPart]]()
    for rank in range(len(files)):
        held = held_by(version, rank, len(files))
        offsets = TensorFile([(name, tensor) for name, _, tensor in held]).offsets
        for (name, layout, _), offset in zip(held, offsets, strict=True):
            parts.setdefault(name, []).append(StoredPart(rank, offset, layout))
    tensors = {
        name: TensorEntry(dtype_name(full[name].dtype), tuple(full[name].shape), tuple(parts[name])) for name in parts
    }
    return Manifest(
        step=version.step,
        epoch=epoch,
        plan=f"dp={len(files)}",
        files=tuple(files),
        tensors=tensors,
        state={"turn": version.turn, "rows": version.rows},
    )


def assert_whole(snapshot: OpenCheckpoint) -> Version:
    """Check every byte of a checkpoint against the one version that it says it is, and return that."""
    snapshot.check()
    version = Version(snapshot.manifest.step, snapshot.manifest.state["turn"], snapshot.manifest.state["rows"])
    for name, tensor in state_of(version).items():
        found = snapshot.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), f"{name} of {version}"
    return version


def write_own(draft: SaveUnderWay, version: Version, rank: int, world: int) -> FileEntry:
    """Write a rank's file."""
    return draft.write(
        f"rank-{rank:05d}.safetensors",
        TensorFile([(name, tensor) for name, _, tensor in held_by(version, rank, world)]),
    )


def save_alone(root: Path, version: Version, world: int = 1) -> Path:
    """Save in this process what `world` ranks would."""
    draft = Store(root).begin(version.step)
    files = [write_own(draft, version, rank, world) for rank in range(world)]
    return draft.commit(manifest_of(version, draft.epoch, files))


# -- ranks as processes ---------------------------------------------------------------------------------------------------


def save_as_rank(root: Path, version: Version, rank: int, peers: Sequence[Connection], keep: int | None) -> None:
    """Save as one rank.

    Args:
        root: The run's directory of checkpoints.
        version: What is saved.
        rank: Which rank this is.
        peers: The first rank's: a connection to each other one, in order. Another rank's: one, to the first.
        keep: How many checkpoints the first rank retains afterwards; None is all.

    Raises:
        EOFError: Another rank has died; the first one deletes what was written.
        StorageError: It has done so while this rank was writing.
    """
    if rank:
        path, epoch, world = peers[0].recv()
        peers[0].send(write_own(SaveUnderWay(Path(path), version.step, epoch), version, rank, world))
        return
    store, world = Store(root), len(peers) + 1
    draft = store.begin(version.step)
    try:
        for peer in peers:
            peer.send((str(draft.path), draft.epoch, world))
        files = [write_own(draft, version, 0, world), *(peer.recv() for peer in peers)]
    except (EOFError, ConnectionError):
        draft.discard()
        raise EOFError("a rank has died") from None
    draft.commit(manifest_of(version, draft.epoch, files))
    if keep is not None:
        store.retain(keep)


@contextlib.contextmanager
def watched(at: Callable[[int, str, str], None]) -> Iterator[None]:
    """Call `at(number, operation, when)` around each operation on files; when is "before", "middle" (of a write) or "after"."""
    count = [0]
    own = {name: getattr(os, name) for name in OPERATIONS if hasattr(os, name)}

    def around(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            number = count[0]
            count[0] += 1
            at(number, name, "before")
            try:
                if name == "write" and len(args[1]) > 1:
                    half = own["write"](args[0], memoryview(args[1])[: len(args[1]) // 2])
                    at(number, name, "middle")
                    return half + own["write"](args[0], memoryview(args[1])[half:])
                return own[name](*args, **kwargs)
            finally:
                at(number, name, "after")

        return run

    try:
        for name in own:
            setattr(os, name, around(name))
        yield
    finally:
        for name, function in own.items():
            setattr(os, name, function)


class Outcome(NamedTuple):
    """How the ranks of one save ended."""

    statuses: list[int]
    """Exit statuses by rank: 0 is well, -9 killed, 3 has seen another one die."""

    @property
    def is_committed(self) -> bool:
        """Whether the first rank came to its end, so that somebody may have been told that the save is there."""
        return self.statuses[0] == 0


At: TypeAlias = Callable[[int, int, str, str], None]
"""Called in a rank's process with rank, number of the operation, its name, and when; when is "done" after the last."""


def run_save(
    root: Path,
    version: Version,
    world: int,
    at: At | None = None,
    keep: int | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Outcome:
    """Save in a process for each rank, forked from this one.

    Args:
        root: The run's directory of checkpoints.
        version: What is saved.
        world: How many ranks [count].
        at: What each rank does around each of its operations on files.
        keep: How many checkpoints are retained afterwards; None is all.
        meanwhile: What this process does until the ranks have ended.
    """
    pairs = [multiprocessing.Pipe() for _ in range(world - 1)]
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            mine = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
            for end in itertools.chain.from_iterable(pairs):
                if end not in mine:
                    end.close()
            _be_rank(functools.partial(save_as_rank, root, version, rank, mine, keep), rank, at)
        children.append(child)
    for end in itertools.chain.from_iterable(pairs):
        end.close()
    if meanwhile is not None:
        meanwhile()
    return Outcome([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])


def _be_rank(work: Callable[[], None], rank: int, at: At | None) -> NoReturn:
    """Do a rank's work in a forked process, and end it."""
    status = 1
    try:
        if at is None:
            work()
        else:
            with watched(functools.partial(at, rank)):
                work()
            at(rank, -1, "", "done")
        status = 0
    except (EOFError, ConnectionError, StorageError):  # the first rank may have deleted the directory already
        status = 3
    finally:
        os._exit(status)
