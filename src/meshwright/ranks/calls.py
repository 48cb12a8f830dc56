"""What the ranks are in the middle of together, and which of them raised an exception in it.

A rank whose code raises in a call that all ranks make (a step, say) leaves its peers in exchanges that it will not come to.
So it leaves its error in the store, and says over shared memory in which call it has raised. A peer that waits for it in the
same call sees that at its next look around, a twentieth of a second apart, and raises an error that has the other's in it.
A rank that has come to all that its peers wait for is not in their way: an error that all ranks raise together ends nothing.

Calls are counted, never named over the wire: the ranks make the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshwright import errors
from meshwright._torch_texts import says_not_yet
from meshwright.comm.shm.build import loaded_extension
from meshwright.errors import LostPeerError, MeshwrightError, RankNote, UserCodeError
from meshwright.ranks.error_transfer import describe_error

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__: list[str] = []

KINDS = ("apply", "step", "evaluate", "forward", "whole", "gradients")
"""Calls that all ranks make together, and in which code of the user's may run."""
_MAX_TEXT = 4000
_LOOK_EVERY = datetime.timedelta(milliseconds=100)


class Calls:
    """The calls of one rank.

    Args:
        rank: This process's rank.
        store: Where ranks leave errors for each other; None where there is none.
    """

    def __init__(self, rank: int, store: Store | None) -> None:
        self._rank = rank
        self._store = store
        self._counts: Counter[int] = Counter()
        self.current = 0
        """The call under way, by a number that is equal on all ranks; 0 outside of any."""
        self.num_models = 0
        """Models that plans were applied to, as far as the ranks have compared notes [count]."""
        self.has_given_up = False
        """Whether an exchange has ended in an error here, or was left behind: the groups are of no use any more."""

    def during(self, kind: str, model: int = 0) -> _PeerCall:
        """Return a context for one call; an exception that leaves it is told to the other ranks.

        Args:
            kind: One of KINDS.
            model: Which model it is a call of, counted from 1.
        """
        place = model * len(KINDS) + KINDS.index(kind)
        self._counts[place] += 1
        return _PeerCall(self, ((place + 1) << 40) + self._counts[place])

    def enter(self, call: int) -> None:
        """Take note of the call that this rank is in from now on."""
        self.current = call
        extension = loaded_extension()
        if extension is not None:
            extension.enter_call(call)

    def tell(self, call: int, error: BaseException) -> None:
        """Tell the other ranks that this one has raised."""
        if self._store is not None:
            description = describe_error(error)
            if not description["secondary"]:
                message, fix = getattr(error, "message", description["text"]), getattr(error, "fix", None)
                told = [
                    self._rank,
                    description["type"],
                    f"{message}"[:_MAX_TEXT],
                    fix,
                    description["traceback"][-_MAX_TEXT:],
                    _facts_of(error),
                ]
                with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
                    self._store.compare_set(_key(call), "", json.dumps(told))  # the first one counts
        extension = loaded_extension()
        if extension is not None:
            extension.tell_raised(call)

    def wait_for(self, work: Any) -> None:
        """Return when an exchange is over; look around for a rank that has raised meanwhile.

        Raises:
            MeshwrightError: One has, and does not come.
        """
        seen = False
        while work is not None:
            try:
                work.wait(_LOOK_EVERY)
            except RuntimeError as error:
                if not says_not_yet(error):
                    raise
            else:
                return
            if seen and (told := self.others_error()) is not None:
                self.has_given_up = True
                raise told from LostPeerError("an exchange over gloo waits for it", rank=self._rank)
            seen = self.has_news()  # what it had begun to send may still come

    def has_news(self) -> bool:
        """Tell whether a rank has left an error in the call under way."""
        if self._store is None or self.current == 0:
            return False
        with contextlib.suppress(RuntimeError):
            return self._store.check([_key(self.current)])
        return False

    def others_error(self) -> MeshwrightError | None:
        """Return an error that names the rank which raised in the call under way, and what; None where none has said so."""
        if not self.has_news() or self._store is None:
            return None
        with contextlib.suppress(RuntimeError, ValueError):
            told = json.loads(self._store.get(_key(self.current)))
            return None if told[0] == self._rank else _rebuild(told)
        return None


class _PeerCall:
    """One call; a class of its own, since a generator's context costs a step a microsecond more."""

    __slots__ = ("_calls", "_number", "_outer")

    def __init__(self, calls: Calls, number: int) -> None:
        self._calls = calls
        self._number = number
        self._outer = 0

    def __enter__(self) -> None:
        self._outer = self._calls.current
        self._calls.enter(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._calls.tell(self._number, error)
        self._calls.enter(self._outer)


def _key(call: int) -> str:
    return f"raised/{call}"


def _facts_of(error: BaseException) -> dict[str, Any]:
    """Return what an error of ours holds beside its text: where it was, and what its class adds."""
    if not isinstance(error, MeshwrightError):
        return {}
    held = {name: value for name, value in vars(error).items() if name not in ("message", "fix")}
    return {
        name: value[:_MAX_TEXT] if isinstance(value, str) else value
        for name, value in held.items()
        if value is None or isinstance(value, (int, float, str))
    }


def _rebuild(told: list[Any]) -> MeshwrightError:
    rank, kind, message, fix, traceback_text, facts = told
    ours: Any = getattr(errors, kind, None)
    if not isinstance(ours, type) or not issubclass(ours, MeshwrightError) or ours is UserCodeError:
        text = f"rank {rank} cannot go on: {kind}: {message}"
        fix = f"see the exception of rank {rank}"
        error: MeshwrightError = UserCodeError(text, rank=rank, traceback_text=traceback_text, fix=fix)
    else:
        error = ours.__new__(ours)
        MeshwrightError.__init__(error, f"rank {rank} cannot go on: {message}", fix=fix)
        vars(error).update(facts)
        error.rank = rank if error.rank is None else error.rank
    error.add_note(RankNote(f"rank {rank}; its traceback:\n{traceback_text}", rank))
    return error
