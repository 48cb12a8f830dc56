"""Checkpoints in what a person names: one step's directory, a directory of steps, or a run's directory."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.checkpoint.durable import told_of
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.open_checkpoint import MANIFEST_FILE
from meshwright.checkpoint.store import Store, name_of
from meshwright.errors import CheckpointError

__all__: list[str] = []

RUN_FOLDER = "checkpoints"
"""Where a run's own directory has them."""


def is_step(path: Path) -> bool:
    """Return whether a directory is one step's."""
    return os.path.lexists(path / MANIFEST_FILE)


def root_of(path: Path) -> Path:
    """Return the directory of steps that a person means: it, or `checkpoints` in a run's directory."""
    inner = path / RUN_FOLDER
    has_own = bool(Store(path).saved())
    return inner if not has_own and inner.is_dir() and not inner.is_symlink() else path


def refuse_other_name(path: Path, manifest: Manifest) -> None:
    """Raise an error if a directory of steps has a checkpoint under another one's name.

    Args:
        path: What `find_steps` found in such a directory.
        manifest: Its manifest.

    Raises:
        CheckpointError: Another step's files lie there.
    """
    own = name_of(manifest.step, manifest.epoch)
    if own != path.name:
        raise CheckpointError(f"{path / MANIFEST_FILE} is of {own}, its directory has another name")


def find_steps(path: Path, step: int | None = None) -> list[Path]:
    """Return the directories of checkpoints in a place, the newest first; no file in them is opened.

    Args:
        path: One step's directory, a directory of steps, or a run's directory.
        step: Only those of this step; a step that was saved again has more than one.

    Raises:
        CheckpointError: There is none.
        StorageError: The place cannot be read.
    """
    with told_of(path, "read"):
        os.scandir(path).close()
    if is_step(path) and step is None:
        return [path]
    saved = Store(root_of(path)).saved()
    found = [one.path for one in saved if step in (None, one.step)]
    if not found:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        others = ", ".join(str(one.step) for one in saved[:10])
        raise CheckpointError(
            f"{which} is in {path}" + (f"; it has steps {others}" if others else ""),
            fix=f"--step {saved[0].step}"
            if saved
            else "name a directory that holds step-... directories, or one of them",
        )
    return found
