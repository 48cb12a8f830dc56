"""Checkpoints of a Trainer that are known to be whole: a file of digests is written last, and read before a run resumes.

transformers writes a checkpoint's files one by one under its last name, and takes the newest name when it resumes. A run that
was killed in a save, or on a full disk, leaves a name there that nobody can resume. Here the newest whole one is taken.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from meshwright._torch_texts import os_error_in
from meshwright.checkpoint.durable import told_of
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.errors import ApplyError, CheckpointError, StorageError
from meshwright.ranks.world import World

__all__: list[str] = []

SEAL = "meshwright.json"
STATE = "trainer_state.json"
"""What transformers writes last, and cannot resume without."""
PARTS = "meshwright"
"""The directory of the ranks' own parts, which has digests of its own."""
_READ = (".safetensors", ".bin", ".pt", ".pth", ".index.json", STATE)
_UNREAD = ("training_args.bin",)
"""What a resumed run does not read, though its names say so."""
_NAME = re.compile(r"checkpoint-(\d+)")
_FULL_BYTES = 2**16
"""A file system with less room than this is full: what torch could not write is told as that [bytes]."""


def break_seal(directory: Path) -> None:
    """Take a checkpoint of this name for unfinished, before its files are written anew; rank 0 calls it."""
    for name in (SEAL, STATE):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (directory / name).unlink()


def seal(directory: Path) -> None:
    """Write the digests of what a resumed run reads of a checkpoint; rank 0 calls it when all is there."""
    found = {str(path.relative_to(directory)): _told(path) for path in _files(directory)}
    draft = directory / f".{SEAL}"
    draft.write_text(json.dumps({"files": found}, indent=1))
    draft.replace(directory / SEAL)


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        inside = path.relative_to(directory)
        is_read = path.name.endswith(_READ) and path.name not in _UNREAD
        if is_read and inside.parts[0] != PARTS and path.is_file():
            yield path


def _told(path: Path) -> list[Any]:
    """Return the size and the digest of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return [path.stat().st_size, digest.hexdigest()]


def find_fault(directory: Path) -> str | None:
    """Return why a checkpoint cannot be resumed, in words; None where nothing is known against it."""
    sealed = directory / SEAL
    try:
        if not sealed.exists():
            state = directory / STATE
            if not state.exists():
                return f"it has no {STATE}, which is written last: its save was interrupted"
            json.loads(state.read_text())
            return None
        files = dict(json.loads(sealed.read_text())["files"])
        for name, (size, digest) in files.items():
            path = directory / name
            if not path.exists():
                if _is_converted(path, files):
                    continue
                return f"'{name}' is missing"
            now = path.stat().st_size
            if now != size:
                return f"'{name}' has {now} bytes, and had {size} when it was saved"
            if _told(path)[1] != digest:
                return f"'{name}' has other contents than when it was saved"
    except (ValueError, TypeError, KeyError) as error:
        return f"'{STATE if not sealed.exists() else SEAL}' is damaged ({error})"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def _is_converted(path: Path, files: dict[str, Any]) -> bool:
    """Tell whether a file of weights that is gone has others in its place, with an index that was not there when it was saved."""
    is_weights = path.suffix in (".safetensors", ".bin")
    return is_weights and any(index.name not in files for index in path.parent.glob("*.index.json"))


def choose(world: World, output_dir: str, asked: Any) -> Any:
    """Return the checkpoint to resume for what a script has asked for, the same on all ranks; all of them call it.

    Args:
        world: This process's place.
        output_dir: Where the Trainer saves.
        asked: As `Trainer.train` takes it: True for the newest one, a path, or nothing.

    Raises:
        ApplyError: Ranks have asked for different ones.
        CheckpointError: The one named is not whole, or none is.
    """
    wanted: Any = asked if asked is None or isinstance(asked, bool) else os.fspath(asked)
    given = _shared(world, wanted)
    if any(other != given[0] for other in given):
        raise ApplyError(
            f"ranks are to resume from different checkpoints: {', '.join(map(repr, given[:8]))} (rank 0 first)",
            fix="give every rank the same resume_from_checkpoint",
        )
    if not wanted:
        return asked
    faults: list[tuple[str, str]] = []
    for path in _shared(world, _candidates(Path(output_dir), wanted) if world.rank == 0 else None)[0]:
        fault = _found_by_ranks(world, Path(path))
        if fault is not None:
            faults.append((path, fault))
            continue
        if faults and world.rank == 0:
            warnings.warn(f"{_text(faults)}\nresuming from {path}", stacklevel=3)
        return path
    if not faults:
        return asked  # transformers tells that there is none
    is_named = wanted is not True
    raise CheckpointError(
        _text(faults),
        fix="resume_from_checkpoint=True, which takes the newest whole one"
        if is_named and len(_newest_first(Path(output_dir))) > 1
        else "leave resume_from_checkpoint out to begin anew",
    )


def refuse_damaged(world: World, directory: str | None) -> None:
    """Raise CheckpointError where a checkpoint is not as it was saved; every rank calls it."""
    fault = _shared(world, find_fault(Path(directory)) if directory and world.rank == 0 else None)[0]
    if fault is not None:
        raise CheckpointError(
            f"{directory} cannot be loaded: {fault}",
            fix="load_best_model_at_end=False, or load another checkpoint by hand",
        )


def _shared(world: World, value: Any) -> list[Any]:
    return world.default_group.all_gather_json(value, device=world.device) if world.world_size > 1 else [value]


def _candidates(output_dir: Path, wanted: Any) -> list[str]:
    if wanted is True:
        return [str(path) for path in _newest_first(output_dir)]
    return [wanted] if Path(wanted).is_dir() else []


def _found_by_ranks(world: World, directory: Path) -> str | None:
    """Return why a checkpoint cannot be resumed; each rank reads a share of what ranks have saved, and rank 0 the rest."""
    fault = find_fault(directory) if world.rank == 0 else None
    found = Store(directory / PARTS).saved() if (directory / PARTS).is_dir() else []
    if fault is None and found:
        try:
            with OpenCheckpoint(found[0].path) as snapshot:
                snapshot.check(world.rank, world.world_size)
        except (CheckpointError, StorageError) as error:
            fault = error.message
    return next((told for told in _shared(world, fault) if told is not None), None)


def _newest_first(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True) if path.is_dir()]


def _text(faults: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"{path} cannot be resumed: {fault}" for path, fault in faults)


@contextlib.contextmanager
def written(directory: Path) -> Iterator[None]:
    """Raise errors of a file system inside the context as `StorageError`, those of torch and safetensors too."""
    with told_of(directory, "write"):
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            number = _number_of(error, directory)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(directory)) from error


def _number_of(error: Exception, directory: Path) -> int | None:
    """Return the error number of the system behind an exception of a library that writes files; None where there is none."""
    if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("safetensors"):
        return None  # torch and safetensors alone write here
    named = os_error_in(error)
    if named is not None:
        return named
    place = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    with contextlib.suppress(OSError):
        left = os.statvfs(place)
        if left.f_bavail * left.f_frsize < _FULL_BYTES or (left.f_files and not left.f_favail):
            return errno.ENOSPC
    return None
