"""A rank's share of a save that is written while training goes on, and read from training's own memory as long as it may be.

Parameters and the optimizer's state change in the optimizer's step alone. So their bytes go from where they lie into the file
while forward and backward run, and just before the step (`let_go`) what is not in the file yet is copied. Whatever else
changes meanwhile (buffers, generators, small tensors) is copied when the save begins.

A script may write into parameters too, through `.data` or another alias that nothing counts. So all bytes are digested when the
save begins, and the file must have the same digests: a share that was written to fails, and is never a mixture.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.checkpoint.blocks import BLOCK_BYTES, DIGEST_BYTES, Digesting, digest_of
from meshwright.checkpoint.tensor_files import DeferredTensor, TensorFile, dtype_name, memory_of
from meshwright.errors import CheckpointError, StorageError

__all__: list[str] = []

_LOG = logging.getLogger(__name__)
LEAST_BYTES = 2**16
"""A smaller tensor is copied at once: that takes less time than to come back to it [bytes]."""
PIECE_BYTES = 2**19
"""What is read from training's memory at once [bytes]."""
_SAMPLE_EVERY, _SAMPLE_BYTES = 4096, 64
FIX = (
    "call mw.wait_for_checkpoint(model) before you write, or save with in_background=False (checkpoint.background = false); the "
    "next saves of this model copy at once, so the same loop may also just go on"
)


class ShareMemory:
    """Memory for copies of a model's shares, and how the next save may treat training's.

    The memory is kept from save to save: fresh memory takes longer than the copy.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self.mode: Literal["watch", "read", "copy"] = "watch"
        """The first save copies, and watches whether a script writes before the next step. If not, later ones read in place."""

    def place(self, name: str, like: Tensor) -> Tensor:
        """Return host memory for a copy of this tensor: [numel], of its dtype.

        Raises:
            MemoryError: There is no room.
            RuntimeError: Likewise, from torch.
        """
        known = self._places.get(name)
        if known is None or known.numel() != like.numel() or known.dtype != like.dtype:
            known = self._places[name] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.is_cuda)
        return known

    def keep(self, names: Sequence[str]) -> None:
        """Free what other names had."""
        kept = set(names)
        self._places = {name: place for name, place in self._places.items() if name in kept}


_MEMORIES: weakref.WeakKeyDictionary[nn.Module, ShareMemory] = weakref.WeakKeyDictionary()


def memory_for(module: nn.Module) -> ShareMemory:
    """Return the memory of a model's saves."""
    return _MEMORIES.setdefault(module, ShareMemory())


class LiveShare:
    """One rank's share of one save.

    The thread that trains makes it and calls `let_go`; another one writes `file`, calls `check`, and in any case `end`.

    Args:
        tensors: (name, tensor) of the share.
        stays: Names of the tensors that nothing changes before `let_go`.
        memory: The memory for copies.
        step: The step that is saved, for errors [count].

    Raises:
        MemoryError: There is no room for copies.
        RuntimeError: Likewise, from torch.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, Tensor]], stays: frozenset[str], memory: ShareMemory, step: int
    ) -> None:
        self._names = [name for name, _ in tensors]
        self._memory = memory
        self._step = step
        self._turn = threading.Lock()
        """Held while training's memory is read: a piece by the writer, the rest by `let_go`."""
        self._is_let_go = False
        self._at = (0, 0)
        """The tensor that is written, and how many of its entries were read for the file."""
        self._piece = torch.empty(max(PIECE_BYTES, 16), dtype=torch.uint8)
        self._failure: StorageError | None = None
        self.waited_s = 0.0
        """For how long the optimizer has waited in `let_go` [s]."""
        memory.keep(self._names)
        held = [name in stays and _can_be_read_later(tensor) for name, tensor in tensors]
        watched = [pair for pair, is_held in zip(tensors, held, strict=True) if is_held and memory.mode == "watch"]
        self._watch = _WriteWatch(watched) if watched else None
        self._is_live = [memory.mode == "read" and is_held for is_held in held]
        self._values = [
            tensor.detach().view(-1) if is_live else self._copied(name, tensor)
            for (name, tensor), is_live in zip(tensors, self._is_live, strict=True)
        ]
        if any(tensor.is_cuda for _, tensor in tensors):
            torch.cuda.synchronize()
        shapes = [tuple(tensor.shape) for _, tensor in tensors]
        self.file = TensorFile(
            [
                (name, DeferredTensor(dtype_name(value.dtype), shape, functools.partial(self._pieces, number)))
                for number, (name, value, shape) in enumerate(zip(self._names, self._values, shapes, strict=True))
            ]
        )
        self._sizes = [value.nbytes for value in self._values]
        self._counts = [value._version for value in self._values]
        self._counted: set[str] = set()
        """Names of tensors of which torch has counted a write before `let_go`."""
        self._is_begun = not any(self._is_live)
        self._expected = None if self._is_begun else self._digests()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        place = self._memory.place(name, tensor)
        place.view(tensor.shape).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return place

    def _digests(self) -> bytes:
        contents = Digesting(self.file)
        collections.deque(contents, maxlen=0)
        self._is_begun = True
        return contents.table()

    def _pieces(self, number: int) -> Iterator[Tensor]:
        """Yield a tensor's entries for the file, each piece as a copy.

        A write that comes between the file's and the digest's look at a piece would otherwise be in one of them alone: undone
        before the digest, it would be in a file whose digests say that it is not.
        """
        if not self._is_begun:  # digested by the thread that trains, which changes nothing meanwhile
            yield self._values[number]
            return
        value = self._values[number]
        own = self._piece.view(value.dtype)
        done, numel = 0, value.numel()
        while done < numel:
            with self._turn:
                if self._failure is not None:
                    raise self._failure
                rest = self._values[number][done : done + own.numel()]  # by now perhaps in the memory for copies
                piece = own[: rest.numel()].copy_(rest)
                done += piece.numel()
                self._at = (number, done)
            yield piece

    def let_go(self) -> None:
        """Copy what is not in the file yet: training is about to change its memory. It does nothing the second time.

        It raises nothing: without room for the copy it is the save that fails.
        """
        start = time.perf_counter()
        with self._turn:  # after Ctrl-C in here the writer goes on, and the next call copies
            if self._is_let_go:
                return
            self._note_writes()
            self._copy_rest()
            self._end_watch()
            self._is_let_go = True
        self.waited_s += time.perf_counter() - start

    def _note_writes(self) -> None:
        rows = zip(self._names, self._values, self._counts, self._is_live, strict=False)  # at the end without values
        self._counted = {name for name, value, count, is_live in rows if is_live and value._version != count}

    def _copy_rest(self) -> None:
        at, done = self._at
        num_copied = 0
        try:
            for number, live in [*enumerate(self._values)][at:]:
                if self._is_live[number]:
                    place = self._memory.place(self._names[number], live)
                    start = done if number == at else 0
                    place[start:].copy_(live[start:])
                    num_copied += live[start:].nbytes
                    self._values[number] = place
        except (MemoryError, RuntimeError) as error:
            self._failure = no_room(sum(self._sizes), self._step, error)

        if 2 * num_copied > sum(self._sizes):
            # Steps are shorter than the writing. A digest takes half of what a copy does, so a copy alone is the shorter wait.
            self._memory.mode = "copy"

    def _end_watch(self) -> None:
        if self._watch is None:
            return
        name, self._watch = self._watch.find_write(), None
        self._memory.mode = "read" if name is None else "copy"
        if name is not None:
            _LOG.info(
                "'%s' was written to between a save and the next step: saves in the background copy at once", name
            )

    def check(self, table: bytes) -> None:
        """Compare the file with what was there when the save began.

        Args:
            table: The digests of its blocks.

        Raises:
            CheckpointError: It has something else: a script has written into it meanwhile.
        """
        expected = self._expected
        if expected is None or table == expected:
            return
        with self._turn:
            self._memory.mode = "copy"
            if not self._is_let_go:
                self._note_writes()
        places = range(0, len(expected), DIGEST_BYTES)
        blocks = [
            place // DIGEST_BYTES
            for place in places
            if table[place : place + DIGEST_BYTES] != expected[place : place + DIGEST_BYTES]
        ]
        names = self._names_in(blocks)
        names = [name for name in names if name in self._counted] or names
        which = f"'{names[0]}'" if len(names) == 1 else f"one or more of {names[:4]}"
        raise CheckpointError(
            f"step {self._step} is not saved: a script has written into {which} beside the save in the background, before the "
            "next step, so the file would have values of two moments (rule: parameters and the optimizer's state stay as they "
            "are from save_checkpoint to the next model.step)",
            fix=FIX,
        )

    def _names_in(self, blocks: Sequence[int]) -> list[str]:
        """Return the names of tensors that were read in place and have bytes in these blocks of the file."""
        found = []
        rows = zip(self._names, self.file.offsets, self._sizes, self._is_live, strict=True)
        for name, start, size, is_live in rows:
            last = (start + size - 1) // BLOCK_BYTES
            if is_live and any(start // BLOCK_BYTES <= block <= last for block in blocks):
                found.append(name)
        return found

    def end(self) -> None:
        """Note that nothing is read any more, whether the file was written or not."""
        with self._turn:
            self._values = []


class _WriteWatch:
    """A look whether tensors are written to: by torch's count of writes, and by digests of some entries of each page.

    It may miss a write through `.data` to a few entries. It decides how the next save begins, and not whether one is right.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in tensors]
        self._seen = [_seen(tensor) for _, tensor in self._tensors]

    def find_write(self) -> str | None:
        """Return the name of a tensor that was written to since, or None."""
        pairs = zip(self._tensors, self._seen, strict=True)
        return next((name for (name, tensor), seen in pairs if _seen(tensor) != seen), None)


def _seen(tensor: Tensor) -> tuple[int, bytes, bytes]:
    """Return torch's count of writes, and digests of the first bytes of each page and of what is behind the last whole one."""
    memory: Any = tensor.view(-1).view(torch.uint8)
    whole = memory.numel() // _SAMPLE_EVERY * _SAMPLE_EVERY
    heads = memory[:whole].view(-1, _SAMPLE_EVERY)[:, :_SAMPLE_BYTES].contiguous()
    return tensor._version, digest_of(memory_of(heads)), digest_of(memory_of(memory[whole:]))


def _can_be_read_later(tensor: Tensor) -> bool:
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and 0 not in tensor.stride()
    return tensor.device.type == "cpu" and is_plain and tensor.nbytes >= LEAST_BYTES


def no_room(num_bytes: int, step: int, error: Exception) -> StorageError:
    """Return the error of a share for whose copy there is no memory.

    Args:
        num_bytes: The share's size [bytes].
        step: The step that is saved [count].
        error: What was raised.
    """
    return StorageError(
        f"cannot copy {num_bytes} bytes of step {step} in the host's memory: {error}",
        fix="save without in_background (checkpoint.background = false)",
    )
