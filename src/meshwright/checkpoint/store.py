"""The directory of a run's checkpoints: what is in it was committed whole, whatever happened to the programs that wrote there.

A save goes into a hidden directory of its own. Its files are written and synced, then the manifest, then the directory, and then
the directory gets its name: that rename is the commit. Nothing that has a name is written to again. A step that is saved a second
time gets a second name, and the newest that is whole counts. What is deleted loses its name first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.blocks import Digesting, digest_of
from meshwright.checkpoint.durable import read_small_file, rename, sync_directory, told_of, write_new_file
from meshwright.checkpoint.manifest import FileEntry, Manifest
from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE, TABLE_SUFFIX, OpenCheckpoint
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError, StorageError

__all__: list[str] = []

_MOST_NOTE_BYTES = 1 << 28
_DRAFT, _DELETED = ".draft-", ".deleted-"
_NAME = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")


class Saved(NamedTuple):
    """A committed checkpoint's place in the order of a run."""

    step: int
    epoch: int
    """1 for the first save of this step, 2 for the second [count]."""
    path: Path


def name_of(step: int, epoch: int) -> str:
    """Return the name of a checkpoint's directory.

    >>> name_of(12, 1), name_of(12, 3)
    ('step-00000012', 'step-00000012.3')
    """
    return f"step-{step:08d}" + (f".{epoch}" if epoch > 1 else "")


class Store:
    """A directory of checkpoints. One process at a time may write; the run's lock sees to that.

    Args:
        root: The directory; it is made at the first save.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def saved(self) -> list[Saved]:
        """Return what is committed, the newest first: by step, then by epoch. No clock decides."""
        found = []
        with told_of(self.root, "read"), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                match = _NAME.fullmatch(entry.name)
                # "step-000000012" would be a second name of what "step-00000012" is.
                if (
                    match
                    and entry.name == name_of(int(match[1]), int(match[2] or 1))
                    and entry.is_dir(follow_symlinks=False)
                ):
                    found.append(Saved(int(match[1]), int(match[2] or 1), Path(entry.path)))
        return sorted(found, reverse=True)

    def newest(self) -> tuple[OpenCheckpoint, list[tuple[Path, str]]]:
        """Return the newest checkpoint without damage, all of it checked, and which newer ones were skipped for what reason.

        Raises:
            CheckpointError: There is none.
        """
        skipped: list[tuple[Path, str]] = []
        for saved in self.saved():
            snapshot = None
            try:
                snapshot = self.open(saved)
                snapshot.check()
            except (CheckpointError, StorageError) as error:
                if snapshot is not None:
                    snapshot.close()
                skipped.append((saved.path, error.message))
                continue
            return snapshot, skipped
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in skipped)
        raise CheckpointError(
            f"no sound checkpoint is in {self.root}{reasons}",
            fix="name the directory that holds step-... directories, or train anew",
        )

    def open(self, saved: Saved) -> OpenCheckpoint:
        """Return a committed checkpoint, open.

        Raises:
            CheckpointError: It is damaged, or another step's files lie under its name.
            StorageError: It cannot be read.
        """
        snapshot = OpenCheckpoint(saved.path)
        manifest = snapshot.manifest
        if name_of(manifest.step, manifest.epoch) != saved.path.name:
            snapshot.close()
            raise CheckpointError(
                f"{saved.path / MANIFEST_FILE} is of {name_of(manifest.step, manifest.epoch)}, its directory has another name"
            )
        return snapshot

    def begin(self, step: int) -> SaveUnderWay:
        """Begin a save; it is nowhere to be seen until it is committed.

        Raises:
            StorageError: The directory cannot be made.
        """
        with told_of(self.root, "make"):
            self.root.mkdir(parents=True, exist_ok=True)
        epochs = [saved.epoch for saved in self.saved() if saved.step == step]
        path = self.root / f"{_DRAFT}{step:08d}-{secrets.token_hex(8)}"
        with told_of(path, "make"):
            path.mkdir()
        return SaveUnderWay(path, step, 1 + max(epochs, default=0))

    def retain(self, keep: int, also: Iterable[int] = ()) -> list[Path]:
        """Delete all but the newest checkpoints.

        Args:
            keep: How many stay, at least one [count].
            also: Steps that stay in any case, of the best one for example.

        Returns:
            What was deleted.

        Raises:
            StorageError: The disk fails.
        """
        stay = set(also)
        gone = [saved.path for saved in self.saved()[max(1, keep) :] if saved.step not in stay]
        for path in gone:
            hidden = path.with_name(f"{_DELETED}{path.name}-{secrets.token_hex(4)}")
            rename(path, hidden)
            _remove(hidden)
        return gone

    def clear_leftovers(self) -> int:
        """Delete what former processes left unfinished, and return how much that was; for the one that holds the run's lock."""
        found: list[Path] = []
        with told_of(self.root, "read"), contextlib.suppress(FileNotFoundError):
            found = [Path(entry.path) for entry in os.scandir(self.root) if entry.name.startswith((_DRAFT, _DELETED))]
        for path in found:
            _remove(path)
        return len(found)


class SaveUnderWay:
    """A save under way.

    Args:
        path: Its hidden directory, which exists.
        step: The step.
        epoch: Which save of this step it is [count].
    """

    def __init__(self, path: Path, step: int, epoch: int) -> None:
        self.path = path
        self.step = step
        self.epoch = epoch

    def write(self, name: str, file: TensorFile) -> FileEntry:
        """Write a file of tensors and its table of digests, synced; each rank writes its own.

        Args:
            name: The file's name, `rank-00000.safetensors` for example.
            file: Its tensors.

        Raises:
            StorageError: The disk is full or fails.
        """
        contents = Digesting(file)
        num_bytes = write_new_file(self.path / name, contents, file.num_bytes)
        table = contents.table()
        write_new_file(self.path / f"{name}{TABLE_SUFFIX}", [table])
        return FileEntry(name, num_bytes, digest_of(table))

    def leave_note(self, writer: int, row: Any) -> None:
        """Leave a note for the writer that commits: a file that appears whole.

        Args:
            writer: The number of the one that leaves it.
            row: JSON.
        """
        name = _note_name(writer)
        write_new_file(self.path / f"{name}.part", [json.dumps(row).encode()])
        rename(self.path / f"{name}.part", self.path / name)

    def read_note(self, writer: int) -> Any:
        """Return another writer's note; None while there is none."""
        try:
            return json.loads(read_small_file(self.path / _note_name(writer), _MOST_NOTE_BYTES))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def remove_note(self, writer: int) -> None:
        """Remove a note that was read."""
        with told_of(self.path / _note_name(writer), "remove"):
            os.unlink(self.path / _note_name(writer))

    def commit(self, manifest: Manifest) -> Path:
        """Write the manifest and give the save its name: one rank's act, after all ranks' files are there.

        Returns:
            The checkpoint's directory. Once this returns, it survives a power cut.

        Raises:
            StorageError: The disk fails, or a file is not as large as its entry says.
        """
        for file in manifest.files:
            with told_of(self.path / file.name, "read"):
                size = os.stat(self.path / file.name, follow_symlinks=False).st_size
            if size != file.num_bytes:
                raise StorageError(
                    f"{self.path / file.name} has {size} bytes, not the {file.num_bytes} that were written"
                )
        write_new_file(self.path / MANIFEST_FILE, [manifest.to_bytes()])
        sync_directory(self.path)
        final = self.path.with_name(name_of(manifest.step, manifest.epoch))
        rename(self.path, final)
        return final

    def discard(self) -> None:
        """Delete it; for a save that has failed."""
        _remove(self.path)


def _note_name(writer: int) -> str:
    return f"note-{writer:05d}.json"


def _remove(path: Path) -> None:
    """Delete a hidden directory; what cannot be deleted stays for the next `clear_leftovers`, and is never loaded."""
    shutil.rmtree(path, ignore_errors=True)
