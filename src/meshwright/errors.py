"""Errors that Meshwright raises on purpose, and their exit codes.

    MeshwrightError                1
    ├── ConfigError                2   usage or configuration
    ├── ApplyError                 2   the plan cannot be applied to this model or on these devices
    ├── MissingDependencyError     2   an optional package is needed
    ├── PlanError                  3   no plan fits
    ├── UserCodeError             10   the user's code raised on a rank
    ├── WorkerKilledError         11   a rank was killed or left early
    ├── LostPeerError             12   a hang, or a peer that is gone
    ├── StorageError              13   a disk or file system failed
    ├── CheckpointError           14   a checkpoint was refused
    ├── NonFiniteError            15   NaN or Inf
    ├── CorruptionError           15   ranks hold or compute different values than they must
    ├── DirectoryInUseError       16   another run owns the directory
    ├── InternalError             70   a bug of ours
    └── StoppedOnRequest          75   stopped on request, resumable

A message says what is wrong, the numbers, the rule, and a fix that works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

__all__: list[str] = []

EXIT_INTERRUPTED_TWICE = 130


class MeshwrightError(Exception):
    """The base of all errors raised on purpose.

    Args:
        message: What is wrong, the numbers and the rule.
        fix: What to do, as something that can be typed; shown on a line of its own.
        rank: The rank that it came from, where it is known.
        step: The step in which that was, where it is known.
        phase: What that rank was doing, a word of `World.report_progress`, where it is known.
        is_told: Whether it tells of another rank's error, which is the cause and is to be shown.
    """

    exit_code: ClassVar[int] = 1
    is_told: bool = False

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        is_told: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.rank = rank
        self.step = step
        self.phase = phase
        self.is_told = is_told or type(self).is_told

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\nfix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders; keyword-only arguments would be lost by the default rule.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(kind: type[MeshwrightError], state: dict[str, object]) -> MeshwrightError:
    error = kind.__new__(kind, state.get("message"))
    error.__dict__.update(state)
    return error


class ConfigError(MeshwrightError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class ApplyError(MeshwrightError):
    """The plan cannot be applied to this model or on these devices."""

    exit_code = 2


class MissingDependencyError(MeshwrightError):
    """An optional package is needed; the message has the line that installs it."""

    exit_code = 2


class PlanError(MeshwrightError):
    """No plan fits."""

    exit_code = 3


class UserCodeError(MeshwrightError):
    """The user's own code raised on a rank.

    Args:
        message: The exception's type and text.
        rank: The rank that raised first.
        traceback_text: Its traceback, as that rank printed it.
        fix: What to do about it.
        raised: The exception as one would print it, "ValueError: no", where this error stands for one.
    """

    exit_code = 10

    def __init__(
        self, message: str, *, rank: int, traceback_text: str = "", fix: str | None = None, raised: str = ""
    ) -> None:
        super().__init__(message, fix=fix, rank=rank)
        self.traceback_text = traceback_text
        self.raised = raised


class WorkerKilledError(MeshwrightError):
    """A rank was killed by a signal, or left before its work was done.

    Args:
        message: What happened.
        rank: The rank that died first.
        signal_name: For example "SIGKILL", or None where it left by itself.
        exit_status: The status it left with, or None where a signal ended it.
        fix: What to do about it.
        step: The step it was in.
        phase: What it was doing.
    """

    exit_code = 11

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        signal_name: str | None = None,
        exit_status: int | None = None,
        fix: str | None = None,
        step: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix, rank=rank, step=step, phase=phase)
        self.signal_name = signal_name
        self.exit_status = exit_status


class LostPeerError(MeshwrightError):
    """A collective did not end: a peer is gone, stuck, or called something else.

    Args:
        message: What happened.
        rank: The rank that noticed.
        peer: The rank that is gone, where it is known.
        fix: What to do about it.
        step: The step that the rank which noticed was in.
        phase: What it was doing.
    """

    exit_code = 12

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        fix: str | None = None,
        step: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix, rank=rank, step=step, phase=phase)
        self.peer = peer


class StorageError(MeshwrightError):
    """A disk or a file system failed, or is full."""

    exit_code = 13


class CheckpointError(MeshwrightError):
    """A checkpoint was refused: damaged, incomplete, or of another model."""

    exit_code = 14


class NonFiniteError(MeshwrightError):
    """NaN or Inf was found before the optimizer step.

    Args:
        message: Where it was found, in words.
        rank: The rank it came from, where it is known.
        micro_batch: The micro-batch on that rank, counted from 0, where it is known.
        parameter: The parameter's FQN, or None where the loss itself is not finite.
        fix: What to do about it.
    """

    exit_code = 15

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        micro_batch: int | None = None,
        parameter: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix, rank=rank)
        self.micro_batch = micro_batch
        self.parameter = parameter


class CorruptionError(MeshwrightError):
    """A sentinel found that ranks hold or compute wrong or different values; the optimizer has not used them.

    Args:
        message: What was found where, in words.
        rank: The rank that it was found on.
        step: The step, counted from 0 in this process.
        part: FQN of the module or parameter; a word such as "loss" where it is neither.
        fix: What to do about it.
    """

    exit_code = 15

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        part: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix, rank=rank, step=step)
        self.part = part


class DirectoryInUseError(MeshwrightError):
    """Another run owns this directory."""

    exit_code = 16


class InternalError(MeshwrightError):
    """A bug of ours; please report it with the text of the message."""

    exit_code = 70


class StoppedOnRequest(MeshwrightError):  # noqa: N818 - it is not a failure
    """The run stopped because it was asked to."""

    exit_code = 75


class RankNote(str):
    """A note on an exception that another rank raised: what is shown of it, and which rank that was.

    An exception of the user's own takes no attributes of ours; notes it takes, and they cross process borders with it.
    """

    rank: int

    def __new__(cls, text: str, rank: int) -> Self:
        note = super().__new__(cls, text)
        note.rank = rank
        return note

    def __reduce__(self) -> tuple[type[RankNote], tuple[str, int]]:
        return type(self), (str(self), self.rank)


def rank_of(error: BaseException) -> int | None:
    """Return the rank that an exception came from, where it is known.

    >>> rank_of(LostPeerError("it has waited 30 s", rank=1))
    1
    >>> rank_of(ValueError("the user's own")) is None
    True
    """
    if isinstance(error, MeshwrightError) and error.rank is not None:
        return error.rank
    return next((note.rank for note in getattr(error, "__notes__", ()) if isinstance(note, RankNote)), None)


def closest_word(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that was probably meant: one that is written much alike, or the only one that has the word as a part.

    Args:
        word: What was written.
        choices: What could have been meant.

    >>> closest_word("micro_batch", ["micro_batches", "dp"]), closest_word("zzz", ["dp"])
    ('micro_batches', None)
    >>> closest_word("DPP", ["pp", "dp"]), closest_word("batch", ["steps", "global_batch_size"])
    ('dp', 'global_batch_size')
    """
    by_lower = {choice.lower(): choice for choice in choices}
    wanted = word.lower()
    close = difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.6)
    # Of those that are equally close, the one that begins alike.
    close.sort(key=lambda name: (difflib.SequenceMatcher(a=name, b=wanted).ratio(), name[0] == wanted[0]), reverse=True)
    parts = [] if close else [name for name in by_lower if wanted in name.split("_")]
    return by_lower[close[0]] if close else by_lower[parts[0]] if len(parts) == 1 else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a hint to append to an error about an unknown word.

    Args:
        word: What was written.
        choices: What could have been meant.

    Returns:
        ``" (did you mean 'x'?)"``, or ``""`` where nothing is close.

    >>> did_you_mean("micro_batch", ["micro_batches", "dp"])
    " (did you mean 'micro_batches'?)"
    >>> did_you_mean("zzz", ["dp"])
    ''
    """
    close = closest_word(word, choices)
    return "" if close is None else f" (did you mean '{close}'?)"


def instead_of(word: str, choices: Iterable[str]) -> str:
    """Return the fix for an unknown word: to write the one that was probably meant, or to leave it out.

    >>> instead_of("micro_batch", ["micro_batches", "dp"]), instead_of("zzz", ["dp"])
    ("write 'micro_batches'", "leave out 'zzz'")
    """
    close = closest_word(word, choices)
    return f"leave out '{word}'" if close is None else f"write '{close}'"


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are.

    >>> some_of(["a", "b", "c"], most=2), some_of(["a"], most=2)
    ('a, b and 1 more', 'a')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def tensors_differ(lines: Sequence[str], most: int = 12) -> str:
    """Return how many tensors differ, and below it the first of the lines that say in what.

    >>> print(tensors_differ(["w: [2] there", "b: missing"], most=1))
    2 tensors differ
      w: [2] there
      and 1 more
    """
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([f"{len(lines)} tensors differ", *lines[:most], *more])


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ended with this exception.

    >>> exit_code_of(ConfigError("no such key"))
    2
    >>> exit_code_of(ValueError("the user's own"))
    10
    """
    if isinstance(error, MeshwrightError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED_TWICE
    return UserCodeError.exit_code
