"""A small file system whose power can be cut: an image with two loop devices, one upon the other.

    ext4  ->  upper loop device  ->  lower loop device (its page cache is the disk's own, volatile cache)  ->  image

What the file system has written and not flushed is in the lower device's page cache. A cut keeps what was flushed, and of the
blocks that were only submitted all, none, or any: a disk may write them in any order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
IMAGE_BYTES = 32 * 2**20


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


class CutDisk:
    """A mounted file system; a context, which unmounts it.

    Args:
        directory: An empty directory, for images and mount points.
        options: More options of the mount, "data=writeback" for example.

    Raises:
        OSError: This machine does not let us mount.
    """

    def __init__(self, directory: Path, options: str = "") -> None:
        self.path = directory / "disk"
        self._image, self._cut, self._cut_path = directory / "image", directory / "cut", directory / "after"
        self._options = ",".join(filter(None, ("commit=60", options)))
        self._num_cuts = 0
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> CutDisk:
        with contextlib.ExitStack() as opened:
            for path in (self.path, self._cut_path):
                path.mkdir()
            self._image.write_bytes(bytes(IMAGE_BYTES))
            self._lower = _run("losetup", "--find", "--show", self._image)
            opened.callback(_run, "losetup", "--detach", self._lower)
            upper = _run("losetup", "--find", "--show", self._lower)
            opened.callback(_run, "losetup", "--detach", upper)
            made = ("-b", str(BLOCK_BYTES), "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
            _run("mkfs.ext4", "-q", *made, upper)
            _run("mount", "-o", self._options, upper, self.path)
            opened.callback(_run, "umount", "--lazy", self.path)  # a rank that was killed may not be gone yet
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def disturb(self, how: str) -> None:
        """Do what the kernel or another program may do at any time.

        Args:
            how: "fsync": a file of somebody else is synced, which commits the journal. "writeback": what is in all files is
                submitted to the disk, and not flushed. "alone": nothing.
        """
        if how == "fsync":
            with (self.path / "somebody-else").open("ab") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
        elif how == "writeback":
            libc = ctypes.CDLL(None, use_errno=True)
            for path in self.path.rglob("*.*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), 7)  # start and wait
                    os.close(descriptor)

    def images_after_a_cut(self, num_mixed: int, source: random.Random) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (kind, image) of disks as a cut at this instant may leave them; no two are equal.

        Args:
            num_mixed: How many have a random choice of the blocks that were submitted and not flushed [count].
            source: Draws that choice.
        """
        flushed = np.fromfile(self._image, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
        submitted = np.fromfile(self._lower, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
        yield "flushed", flushed
        differing = np.flatnonzero((flushed != submitted).any(axis=1))
        if differing.size:
            yield "submitted", submitted
        for _ in range(num_mixed if differing.size > 1 else 0):
            some = [block for block in differing.tolist() if source.random() < 0.5]
            if 0 < len(some) < differing.size:
                mixed = flushed.copy()
                mixed[some] = submitted[some]
                yield "mixed", mixed

    @contextlib.contextmanager
    def mounted(self, image: np.ndarray) -> Iterator[Path]:
        """Mount such a disk, as the next start of the machine would: the journal is played back; give its place."""
        # A file of its own each time: the kernel may not be done with the loop device of the last one, and show that disk again.
        self._num_cuts += 1
        cut = f"{self._cut}-{self._num_cuts}"
        image.tofile(cut)
        try:
            _run("mount", "-o", "loop,commit=60", cut, self._cut_path)
            try:
                yield self._cut_path
            finally:
                _run("umount", self._cut_path)
        finally:
            Path(cut).unlink()


def can_mount(directory: Path) -> bool:
    """Return whether this process may make loop devices and mount them."""
    if os.getuid():
        return False
    try:
        with CutDisk(directory):
            return True
    except OSError:
        return False
