"""The directory of a run's checkpoints: what is in it was committed whole, whatever happened to the programs that wrote there.

A save goes into a hidden directory of its own. Its files are written and synced, then the manifest, then the directory, and then
the directory gets its name: that rename is the commit. Nothing that has a name is written to again. A step that is saved a second
time gets a second name, and the newest that is whole counts. What is deleted loses its name first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.blocks import Digesting, digest_of
from meshwright.checkpoint.durable import (
    make_directory,
    read_small_file,
    rename,
    sync_directory,
    told_of,
    write_new_file,
)
from meshwright.checkpoint.manifest import FileEntry, Manifest
from meshwright.checkpoint.open_checkpoint import (
    MANIFEST_FILE,
    MOST_STEP,
    TABLE_SUFFIX,
    OpenCheckpoint,
    name_of,
    step_and_epoch,
)
from meshwright.checkpoint.tensor_files import TensorFile
from meshwright.errors import CheckpointError, StorageError

__all__: list[str] = []

_MOST_NOTE_BYTES = 1 << 28
_DRAFT, _DELETED = ".draft-", ".deleted-"


class Saved(NamedTuple):
    """A committed checkpoint's place in the order of a run."""

    step: int
    epoch: int
    """1 for the first save of this step, 2 for the second [count]."""
    path: Path


class Store:
    """A directory of checkpoints. One process at a time may write; the run's lock sees to that.

    Args:
        root: The directory; it is made at the first save.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def saved(self) -> list[Saved]:
        """Return what is committed, the newest first: by step, then by epoch. No clock decides."""
        return sorted((saved for saved, is_own in self._named() if is_own), reverse=True)

    def _named(self) -> list[tuple[Saved, bool]]:
        """Return what has a checkpoint's name, and whether it is a directory of its own: links and files are never loaded."""
        found = list[tuple[Saved, bool]]()
        with told_of(self.root, "read"), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                if place := step_and_epoch(entry.name):
                    found.append((Saved(*place, Path(entry.path)), entry.is_dir(follow_symlinks=False)))
        return found

    def newest(self) -> tuple[OpenCheckpoint, list[tuple[Path, str]]]:
        """Return the newest checkpoint without damage, all of it checked, and which newer ones were skipped for what reason.

        Raises:
            CheckpointError: There is none.
        """
        skipped: list[tuple[Path, str]] = []
        # Looked at anew each time: a run that goes on saving may delete what is about to be opened, and have a newer one.
        while untried := [saved for saved in self.saved() if saved.path not in {path for path, _ in skipped}]:
            path, snapshot = untried[0].path, None
            try:
                snapshot = OpenCheckpoint(path)
                snapshot.check()
            except (CheckpointError, StorageError) as error:
                if snapshot is not None:
                    snapshot.close()
                skipped.append((path, error.message))
                continue
            return snapshot, [(path, reason) for path, reason in skipped if os.path.lexists(path)]
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in skipped)
        raise CheckpointError(
            f"no sound checkpoint is in {self.root}{reasons}",
            fix="name the directory that holds step-... directories, or train anew",
        )

    def begin(self, step: int) -> SaveUnderWay:
        """Begin a save; it is nowhere to be seen until it is committed.

        Raises:
            CheckpointError: The step is negative or has more than 18 digits.
            StorageError: The directory cannot be made.
        """
        if not 0 <= step <= MOST_STEP:
            raise CheckpointError(f"step is {step} (rule: 0 to {MOST_STEP})")
        make_directory(self.root)
        epochs = [saved.epoch for saved, _ in self._named() if saved.step == step]  # a link has taken its name, too
        path = self.root / f"{_DRAFT}{step:08d}-{secrets.token_hex(8)}"
        with told_of(path, "make"):
            path.mkdir()
        return SaveUnderWay(path, step, 1 + max(epochs, default=0))

    def retain(self, keep: int, also: Iterable[int] = (), *, own: Path | None = None) -> list[Path]:
        """Delete all but the newest checkpoints. Those that cannot be opened do not count, and stay as long as younger ones do.

        Args:
            keep: How many sound ones stay, at least one [count].
            also: Steps that stay in any case, of the best one for example.
            own: A checkpoint that stays in any case: the one saved just now, where later steps of before are in the way.

        Returns:
            What was deleted.

        Raises:
            StorageError: The disk fails.
        """
        stay, missing, gone = set(also), max(1, keep), list[Path]()
        for saved in self.saved():
            if missing:
                missing -= _can_be_opened(saved.path)
            elif saved.step not in stay and (own is None or saved.path.name != own.name):
                gone.append(saved.path)
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

    @property
    def final_path(self) -> Path:
        """The checkpoint's directory, once it is committed."""
        return self.path.with_name(name_of(self.step, self.epoch))

    def write(self, name: str, file: TensorFile, check: Callable[[bytes], object] | None = None) -> FileEntry:
        """Write a file of tensors and its table of digests, synced; each rank writes its own.

        Args:
            name: The file's name, `rank-00000.safetensors` for example.
            file: Its tensors.
            check: Called with the table before it is written; what it raises, this raises.

        Raises:
            StorageError: The disk is full or fails.
        """
        contents = Digesting(file)
        num_bytes = write_new_file(self.path / name, contents, file.num_bytes)
        table = contents.table()
        if check is not None:
            check(table)
        write_new_file(self.path / f"{name}{TABLE_SUFFIX}", [table])
        return FileEntry(name, num_bytes, digest_of(table))

    def leave_note(self, writer: int, row: Any) -> None:
        """Leave a note for the writer that commits: a file that appears whole.

        The directory is not synced after it: from the note on it belongs to the writer that commits, which syncs it and gives it
        another name, perhaps before this call returns.

        Args:
            writer: The number of the one that leaves it.
            row: JSON.

        Raises:
            StorageError: The disk is full or fails.
        """
        part, note = (self.path / f"{_note_name(writer)}{suffix}" for suffix in (".part", ""))
        write_new_file(part, [json.dumps(row).encode()])
        with told_of(note, "rename"):
            os.rename(part, note)

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
            CheckpointError: The manifest's parts do not make a whole.
            StorageError: The disk fails, or a file is not as large as its entry says.
        """
        data = manifest.to_bytes()
        # Read back before it counts: what is wrong with it must not be found out when it is needed.
        Manifest.from_bytes(data, str(self.path))
        for file in manifest.files:
            with told_of(self.path / file.name, "read"):
                size = os.stat(self.path / file.name, follow_symlinks=False).st_size
            if size != file.num_bytes:
                raise StorageError(
                    f"{self.path / file.name} has {size} bytes, not the {file.num_bytes} that were written"
                )
        write_new_file(self.path / MANIFEST_FILE, [data])
        sync_directory(self.path)
        rename(self.path, self.final_path)
        return self.final_path

    def discard(self) -> None:
        """Delete it; for a save that has failed."""
        _remove(self.path)


def _note_name(writer: int) -> str:
    return f"note-{writer:05d}.json"


def _can_be_opened(path: Path) -> bool:
    try:
        OpenCheckpoint(path).close()
    except (CheckpointError, StorageError):
        return False
    return True


def _remove(path: Path) -> None:
    """Delete a hidden directory; what cannot be deleted stays for the next `clear_leftovers`, and is never loaded."""
    shutil.rmtree(path, ignore_errors=True)
