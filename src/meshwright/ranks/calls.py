"""Calls that all ranks make together (a step, say), and the exceptions that ranks raise in them.

A rank whose code raises in such a call leaves its peers in exchanges that it will not reach. So it puts its error into the store,
and writes the call's number into shared memory. A peer that waits in the same call polls that every twentieth of a second, and
raises an error that contains the other's. An error that all ranks raise together leaves none waiting, and ends nothing.

Calls are identified by their number alone, since the ranks make the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshwright import errors
from meshwright._torch_texts import says_not_yet
from meshwright.comm.peer_calls import NUMBER_BITS
from meshwright.comm.shm.build import loaded_extension
from meshwright.errors import ApplyError, LostPeerError, MeshwrightError, RankNote, UserCodeError
from meshwright.mesh import MeshSpec
from meshwright.ranks.error_transfer import describe_error

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__: list[str] = []

_NAMES = {
    "apply": "apply_plan",
    "step": "model.step",
    "evaluate": "model.evaluate",
    "forward": "model(...)",
    "whole": "whole_parameters or full_state_dict",
    "gradients": "a call for whole gradients or their norm",
    "save": "save_checkpoint",
    "load": "load_checkpoint",
    "backward": "model.backward",
    "trainer": "a call of the Trainer",
}
KINDS = tuple(_NAMES)
"""Calls that all ranks make together, and in which code of the user's may run."""
_ANSWER_WITHIN = datetime.timedelta(seconds=1)
_MAX_TEXT = 4000
_LOOK_EVERY = datetime.timedelta(milliseconds=100)


class Calls:
    """The calls of one rank.

    Args:
        rank: This process's rank.
        store: The store for errors between ranks, or None.
    """

    def __init__(self, rank: int, store: Store | None) -> None:
        self._rank = rank
        self._store = store
        self._counts: Counter[int] = Counter()
        self.current = 0
        """The call under way, by a number that is equal on all ranks; 0 outside of any."""
        self.around: list[int] = []
        """The calls around the current one, outermost first."""
        self._failed = 0
        self._num_asked = 0
        self.num_models = 0
        """Models that plans were applied to, as far as the ranks have compared notes [count]."""
        self.meshes: list[MeshSpec] = []
        """Meshes of the plans that have given ranks of dp generators of their own, the same on every rank."""
        self.has_given_up = False
        """Whether an exchange has ended in an error here, or was left behind: the groups are of no use any more."""
        self.hears_of_failure: Callable[[], bool] = lambda: False
        """Tells whether a rank of this job has failed outside of any call."""

    def during(self, kind: str, model: int = 0) -> _PeerCall:
        """Return the context of one call; an exception that leaves it is told to the other ranks.

        Args:
            kind: One of KINDS.
            model: Number of the model, from 1.
        """
        place = model * len(KINDS) + KINDS.index(kind)
        self._counts[place] += 1
        return _PeerCall(self, ((place + 1) << NUMBER_BITS) + self._counts[place])

    def enter(self, call: int) -> None:
        """Record the call that this rank has entered, or come back to."""
        if self.current == 0:
            self._failed = 0
        self.current = call
        extension = loaded_extension()
        if extension is not None:
            extension.enter_call(call, next((outer for outer in self.around if outer), call))

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

    def tell_missing(self, rank: int, text: str) -> None:
        """Tell the ranks that wait in the call that this one has left that another will not come.

        Args:
            rank: The rank that is missing.
            text: What is known of it.
        """
        if self._store is None or self._failed == 0:
            return
        told = [self._rank, LostPeerError.__name__, text[:_MAX_TEXT], None, "", {"rank": self._rank, "peer": rank}]
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_key(self._failed), "", json.dumps(told))
        extension = loaded_extension()
        if extension is not None:
            extension.tell_raised(self._failed)

    def left_by(self, call: int, error: BaseException) -> None:
        """Note that an exception has ended a call here, the innermost one where calls are nested, and tell the other ranks."""
        self._failed = self._failed or call
        self.tell(call, error)

    def wait_for(self, work: Any) -> None:
        """Wait for the end of an exchange, and meanwhile check whether a rank has raised.

        Raises:
            MeshwrightError: A rank has raised, and will not reach the exchange.
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
            if self.hears_of_failure():
                self.has_given_up = True
                raise LostPeerError("an exchange over gloo waits, and a rank has told of its failure", rank=self._rank)
            seen = self.has_news()  # a message that it had started to send may still arrive

    def has_news(self) -> bool:
        """Tell whether a rank has reported an error in the current call, or in one around it."""
        return self._call_with_news() != 0

    def _call_with_news(self) -> int:
        """Return the innermost call under way in which a rank has reported an error; 0 where there is none."""
        if self._store is None:
            return 0
        with contextlib.suppress(RuntimeError):
            for call in (self.current, *reversed(self.around)):
                if call and self._store.check([_key(call)]):
                    return call
        return 0

    @property
    def kind(self) -> int:
        """The kind of the current call and its model, by a number that is equal on all ranks; 0 outside of any."""
        return self.current >> NUMBER_BITS

    @property
    def name_number(self) -> int:
        """The kind of the current call, of whatever model; 0 outside of any."""
        return 1 + (self.kind - 1) % len(KINDS) if self.current else 0

    def different(self, told: Mapping[int, int]) -> ApplyError:
        """Return the error for ranks that are in different calls.

        Args:
            told: `current` of each rank, by rank.
        """
        are_of_one_kind = len({call >> NUMBER_BITS for call in told.values()}) == 1
        found: dict[str, list[int]] = {}
        for rank, call in sorted(told.items()):
            found.setdefault(_text_of(call, with_number=are_of_one_kind), []).append(rank)
        rows = [f"rank{'s' * (len(ranks) > 1)} {_numbers(ranks)} in {text}" for text, ranks in found.items()]
        fix = "have every rank run the same calls in the same order: no branch on the rank around apply_plan, a step or a save"
        if are_of_one_kind:
            fix = "have every rank make each call: one that leaves a call by an exception which it catches alone is a call ahead"
        return ApplyError(f"ranks are in different calls: {'; '.join(rows)}", fix=fix)

    def stand(self, ranks: Sequence[int]) -> MeshwrightError | None:
        """Return the error that names the calls of ranks which do not agree about an exchange; None where they are in one.

        Args:
            ranks: The ranks of the exchange; each of them calls this.
        """
        if self._store is None:
            return None
        self._num_asked += 1
        told: dict[int, int] = {}
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone, and a rank with it
            self._store.set(f"stands/{self._num_asked}/{self._rank}", str(self.current))
            for rank in ranks:
                key = f"stands/{self._num_asked}/{rank}"
                self._store.wait([key], _ANSWER_WITHIN)
                told[rank] = int(self._store.get(key))
        return self.different(told) if len({*told.values()}) > 1 else None

    def apart(self, ranks: Sequence[int], error: Exception) -> MeshwrightError | None:
        """Return the error for ranks that do not agree about an exchange: in other calls, or on other ways in one.

        Args:
            ranks: The ranks of the exchange; each of them calls this.
            error: What the transport says of it.

        Returns:
            The error; None where they are in no call.
        """
        if (told := self.stand(ranks)) is not None or not self.current:
            return told
        return ApplyError(
            f"ranks have gone different ways in {_text_of(self.current, with_number=False)}: {error}",
            fix="have every rank do alike what decides its way: the form and the types of its batch, what modules are set to, "
            "hooks, torch's own settings, and exceptions that a script catches",
        )

    def others_error(self) -> MeshwrightError | None:
        """Return the error of the rank that raised in the current call or one around it; None where none is reported."""
        call = self._call_with_news()
        if not call or self._store is None:
            return None
        with contextlib.suppress(RuntimeError, ValueError):
            told = json.loads(self._store.get(_key(call)))
            return None if told[0] == self._rank else _rebuild(told)
        return None


class _PeerCall:
    """The context of one call; a class, since a generator's context costs a step a microsecond more."""

    __slots__ = ("_calls", "_number", "_outer")

    def __init__(self, calls: Calls, number: int) -> None:
        self._calls = calls
        self._number = number
        self._outer = 0

    def __enter__(self) -> None:
        self._outer = self._calls.current
        self._calls.around.append(self._outer)
        self._calls.enter(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._calls.left_by(self._number, error)
        self._calls.around.pop()
        self._calls.enter(self._outer)


def _text_of(call: int, *, with_number: bool) -> str:
    """Return the name of a call, with the model that it is of where it is not the first, or with its number among its kind."""
    kind, number = divmod(call, 1 << NUMBER_BITS)
    if kind == 0:
        return "no call of all ranks"
    model, place = divmod(kind - 1, len(KINDS))
    text = _NAMES[KINDS[place]] + (f" (model {model})" if model > 1 else "")
    return f"{text}, number {number}" if with_number else text


def _numbers(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} others" if len(ranks) > most else "")


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
