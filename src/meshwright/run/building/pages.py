"""Memory in a file that has no name: its pages leave this process's memory when asked to, and come back when they are used."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

__all__: list[str] = []

_PIECE_BYTES = 1 << 24
"""Memory that is moved at once [bytes]."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_FAILED = ctypes.c_void_p(-1).value
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAY_MOVE, _TO_ADDRESS = 1, 2  # <linux/mman.h>
_MAP_FIXED = 0x10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>

_LOCK = threading.RLock()
"""Held while blocks are mapped: one may be freed wherever the collector runs, and a fork must not come in between."""


class _Block(NamedTuple):
    address: int
    size: int
    offset: int


class Pages:
    """Blocks of memory in one file of a directory, which the system removes with this process.

    A block's address never changes, so tensors on it are tensors like others. A process that is forked off has copies, as of any
    other memory.

    Args:
        directory: A directory on a disk.

    Raises:
        OSError: No file can be made there.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._file = file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - as long as this object
        weakref.finalize(self, file.close)  # each block keeps this object
        self._end = 0
        self._paged: dict[int, _Block] = {}  # by address: blocks whose pages are in the file
        self._private: dict[int, _Block] = {}  # blocks that a fork has seen: what is written since is in memory alone
        self._all: dict[int, _Block] = {}
        self._num_walks = 0
        self._freed: list[tuple[_Block, bool]] = []
        self.is_inherited = False
        """Whether this process was forked off from the one that writes the file: there is no room in it then."""
        _OPEN.add(self)

    @property
    def num_bytes(self) -> int:
        """What lies in the file [bytes]."""
        with _LOCK:
            return sum(block.size for block in [*self._paged.values(), *self._private.values()])

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage lies in the file."""
        return storage.data_ptr() in self._paged or storage.data_ptr() in self._private

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return fresh memory in the file; its values are zeros.

        Raises:
            OSError: The disk is full, or another process writes the file.
        """
        if self.is_inherited:
            raise OSError("the file belongs to the process that this one was forked from")
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with _LOCK:
            # Not a sparse file: a page that finds no room on the disk later would end the process.
            os.posix_fallocate(self._file.fileno(), self._end, size)
            address = _map(size, mmap.MAP_SHARED, self._file.fileno(), self._end)
            self._paged[address] = self._all[address] = _Block(address, size, self._end)
            self._end += size
        memory = (ctypes.c_char * num_bytes).from_address(address)
        # It lives as long as the storage, which keeps a reference.
        weakref.finalize(memory, self._free, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _free(self, address: int) -> None:
        with _LOCK:
            block = self._all.pop(address)
            self._private.pop(address, None)
            is_paged = self._paged.pop(address, None) is not None
            if self._num_walks:  # the collector runs in the middle of a walk, which may use this block next
                self._freed.append((block, is_paged))
            else:
                self._unmap(block, is_paged=is_paged)

    def _unmap(self, block: _Block, *, is_paged: bool) -> None:
        _libc().munmap(block.address, block.size)
        if is_paged:
            self._give_back(block)

    def _give_back(self, block: _Block) -> None:
        """Give the disk the room of a block back; no other process has seen it."""
        if not self._file.closed:
            _libc().fallocate(self._file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, block.offset, block.size)

    @contextlib.contextmanager
    def _walk(self) -> Iterator[None]:
        """Hold the lock; blocks that are freed inside stay mapped until the end."""
        with _LOCK:
            self._num_walks += 1
            try:
                yield
            finally:
                self._num_walks -= 1
                while self._freed and not self._num_walks:
                    block, is_paged = self._freed.pop()
                    self._unmap(block, is_paged=is_paged)

    def release(self) -> None:
        """Let all pages leave this process's memory; whoever uses one has it back, unchanged."""
        with self._walk():
            for block in list(self._paged.values()):
                _advise(block.address, block.size, mmap.MADV_DONTNEED)

    def bring_in(self) -> None:
        """Put all blocks into plain memory, each at its address, one after the other.

        Raises:
            OSError: There is no memory; the blocks that are left stay in the file.
        """
        with self._walk():
            for block in [*self._paged.values(), *self._private.values()]:
                address, is_paged = block.address, block.address in self._paged
                if not is_paged and address not in self._private:
                    continue
                fresh = _map(block.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
                _advise(fresh, block.size, mmap.MADV_HUGEPAGE)
                for start in range(0, block.size, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, block.size - start)
                    ctypes.memmove(fresh + start, address + start, length)
                    if is_paged:
                        _advise(address + start, length, mmap.MADV_DONTNEED)
                # In this order: Ctrl-C may come between any two lines, and no value may be lost. From here on "not in use" would
                # mean "lost": plain memory has no file behind it.
                self._paged.pop(address, None)
                self._private.pop(address, None)
                if _libc().mremap(fresh, block.size, block.size, _MAY_MOVE | _TO_ADDRESS, address) != address:
                    raise OSError(ctypes.get_errno(), "mremap failed")
                if is_paged:
                    self._give_back(block)

    def close(self) -> None:
        """Close the file, which takes no further blocks; those that lie in it stay."""
        self._file.close()

    def prepare_fork(self) -> None:
        """Have this process and the one to be forked off write into memory of their own from now on, not into the file."""
        with self._walk():
            for block in list(self._paged.values()):
                flags = mmap.MAP_PRIVATE | _MAP_FIXED
                _map(block.size, flags, self._file.fileno(), block.offset, address=block.address)
                self._private[block.address] = self._paged.pop(block.address)


def _before_fork() -> None:
    _LOCK.acquire()
    for pages in list(_OPEN):
        pages.prepare_fork()


def _after_fork_in_child() -> None:
    for pages in list(_OPEN):
        pages.is_inherited = True
    _LOCK.release()


_OPEN: weakref.WeakSet[Pages] = weakref.WeakSet()
os.register_at_fork(before=_before_fork, after_in_parent=_LOCK.release, after_in_child=_after_fork_in_child)


def find_directory() -> str | None:
    """Return a directory for temporary files that lies on a disk, or None: on another system than Linux, for example."""
    if sys.platform != "linux":
        return None
    candidates = [tempfile.gettempdir(), "/var/tmp"]  # noqa: S108 - the file there has no name
    return next((path for path in candidates if os.path.isdir(path) and _kind_of(path) not in _IN_MEMORY), None)


def _kind_of(path: str) -> str:
    """Return the type of the file system that a directory lies on."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            front, _, back = line.partition(" - ")
            if front.split()[2] == wanted:
                return back.split()[0]
    return ""


def _map(size: int, flags: int, descriptor: int, offset: int, address: int | None = None) -> int:
    found = _libc().mmap(address, size, _READ_AND_WRITE, flags, descriptor, offset)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(found)


def _advise(address: int, size: int, advice: int) -> None:
    _libc().madvise(address, size, advice)  # advice that is not taken costs memory or disk, and no numbers


def _libc() -> Any:
    global _LIBC
    if _LIBC is None:
        found = ctypes.CDLL(None, use_errno=True)
        size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        found.mmap.restype, found.mmap.argtypes = address, [address, size, number, number, number, ctypes.c_long]
        found.mremap.restype, found.mremap.argtypes = address, [address, size, size, number, address]
        found.madvise.restype, found.madvise.argtypes = number, [address, size, number]
        found.munmap.restype, found.munmap.argtypes = number, [address, size]
        found.fallocate.restype, found.fallocate.argtypes = number, [number, number, ctypes.c_int64, ctypes.c_int64]
        _LIBC = found
    return _LIBC


_LIBC: Any = None
