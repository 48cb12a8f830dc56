"""Ranks as threads of one process, whose exchanges meet at a barrier.

One thread runs at a time, from one barrier to the next. Threads that ran side by side would wait for the interpreter's lock at
each operation, since torch gives it up there: several times the processor time, and another order in each run.

Each thread has the process's switches for itself: code that sets one for a while (`sdpa_kernel`, a default dtype) may exchange
inside, and the threads' ends would then restore each other's settings.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError

__all__: list[str] = []


Result = TypeVar("Result")

_TIMEOUT_S: Final = 600.0
"""How long a thread waits for its turn."""


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda, torch.backends.cudnn


def _switches() -> tuple[Any, ...]:
    """Return the settings of the whole process that code on the way of a forward may set for a while."""
    attention, cudnn = _backends()
    return (
        torch.get_default_dtype(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
        (attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
    )


def _switch(wanted: tuple[Any, ...]) -> None:
    if wanted == _switches():
        return
    attention, cudnn = _backends()
    dtype, (is_deterministic, warns), cudnn_flags, (flash, efficient), (math, of_cudnn) = wanted
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = cudnn_flags
    attention.enable_flash_sdp(flash)
    attention.enable_mem_efficient_sdp(efficient)
    attention.enable_math_sdp(math)
    attention.enable_cudnn_sdp(of_cudnn)


@contextlib.contextmanager
def _kept_filters() -> Iterator[None]:
    """Restore the filters of warnings where the threads have left others; where they have not, no warning is shown again."""
    names = vars(warnings).keys() & {"filters", "showwarning", "_showwarnmsg_impl"}
    before = {name: vars(warnings)[name] for name in names}
    try:
        yield
    finally:
        if any(vars(warnings)[name] is not value for name, value in before.items()):
            for name, value in before.items():
                setattr(warnings, name, value)
            with warnings.catch_warnings():  # its end makes the interpreter read them anew
                pass


class Meeting:
    """The turns and the memory through which the threads exchange."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self._is_broken = False
        self._callers = _switches()
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns[1:]:
            turn.acquire()

    @contextlib.contextmanager
    def member(self, part: int) -> Iterator[None]:
        """Run a thread's code in its turns; where it raises, the others do at their next turn."""
        try:
            self._take(part)
            _switch(self._callers)
            yield
        except BaseException:
            self.abort()
            raise
        self._pass(part)

    def wait(self, part: int) -> None:
        """Return when all threads have come this far.

        Raises:
            threading.BrokenBarrierError: Another thread has failed.
        """
        own = _switches()
        self._pass(part)
        self._take(part)
        _switch(own)

    def close(self) -> None:
        """Leave the process as it was, when all threads have ended."""
        _switch(self._callers)

    def abort(self) -> None:
        """Let every thread that waits raise, now and later."""
        self._is_broken = True
        for part in range(len(self._turns)):
            self._give(part)

    def _take(self, part: int) -> None:
        if not self._turns[part].acquire(timeout=_TIMEOUT_S):
            self.abort()
        if self._is_broken:
            raise threading.BrokenBarrierError

    def _pass(self, part: int) -> None:
        self._give((part + 1) % len(self._turns))

    def _give(self, part: int) -> None:
        with contextlib.suppress(RuntimeError):  # after an abort it may have its turn already
            self._turns[part].release()


def run_as_ranks(size: int, work: Callable[[Any], Result]) -> tuple[list[Result | None], list[BaseException]]:
    """Run a function in threads, each with its `ThreadGroup`; return their results, and what they raised, the first one first.

    Args:
        size: Threads [count].
        work: What each does with its group.
    """
    meeting = Meeting(size)
    found: list[Result | None] = [None] * size
    errors: list[BaseException] = []

    def run(part: int) -> None:
        try:
            with meeting.member(part):
                found[part] = work(ThreadGroup(meeting, size, part))
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits for this one
            errors.append(error)

    threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in range(size)]
    with _kept_filters():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    meeting.close()
    return found, errors


class ThreadGroup:
    """A Communicator among threads of one process, with the calls that layers need; all threads share the meeting."""

    def __init__(self, meeting: Meeting, size: int, group_rank: int) -> None:
        self.size = size
        self.group_rank = group_rank
        self._meeting = meeting

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        self._meeting.given[self.group_rank] = (name, tuple(tensor.shape), tensor)
        self._meeting.wait(self.group_rank)
        everyone = list(self._meeting.given)
        self._meeting.wait(self.group_rank)
        if len({entry[:2] for entry in everyone}) != 1:
            raise DisprovedError(f"the ranks exchange different things: {[entry[:2] for entry in everyone]}")
        return [entry[2] for entry in everyone]

    def leave(self) -> None:
        """Meet the others at the end; a thread that exchanges more often than another would wait for it."""
        self._exchange("end", torch.empty(0))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        parts = [part.clone() for part in self._exchange(f"all_reduce {op}", tensor.detach())]
        self._meeting.wait(self.group_rank)  # nobody writes before all have read
        stacked = torch.stack(parts)
        tensor.copy_({"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0))

    def all_gather_stacked(self, stacked: Tensor, piece: Tensor) -> None:
        parts = self._exchange("all_gather", piece.detach())
        stacked.copy_(torch.cat(parts))
        self._meeting.wait(self.group_rank)

    def reduce_scatter_stacked(self, own: Tensor, stacked: Tensor) -> None:
        parts = self._exchange("reduce_scatter", stacked.detach())
        own.copy_(torch.stack(parts).sum(0).chunk(self.size)[self.group_rank])
        self._meeting.wait(self.group_rank)
