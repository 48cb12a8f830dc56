"""States of a run's ranks, as the launching process writes them to `ranks.json` once a second, for those who watch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, cast

from meshwright.errors import ConfigError

__all__: list[str] = []

STATES_FILE: Final = "ranks.json"
LEAST_LATE_S: Final = 5.0
"""A wait that is shorter says nothing [s]."""
_MOST_RANKS: Final = 1 << 16
_MOST_TEXT: Final = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """One rank when the file was written.

    Args:
        pid: Its process.
        step: The step under way, from 0; -1 before the first.
        phase: What it does, one word.
        progress_s: Since its last progress [s].
        wait_s: Since when it waits in an exchange; None where it waits in none [s].
        collective: That exchange.
        num_waits: Exchanges that it has waited in [count].
        rss_bytes: Its resident memory [bytes].
        host: Its host, where ranks came from several; "" for the one that the file was written on.
    """

    pid: int
    step: int
    phase: str
    progress_s: float
    wait_s: float | None
    collective: str
    num_waits: int
    rss_bytes: int
    host: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """All ranks at one moment.

    Args:
        written_at: When, seconds since 1970 [s].
        limit_s: A wait beyond this is longer than steps explain; None while nothing is known of them [s].
        ranks: The ranks.
    """

    written_at: float
    limit_s: float | None
    ranks: tuple[RankActivity, ...]

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RankStates:
        """Read what `to_json` gave.

        Raises:
            ConfigError: It is something else.
        """
        try:
            data: Any = json.loads(text)
            ranks = tuple(RankActivity(**one) for one in data["ranks"][:_MOST_RANKS])
            found = cls(written_at=data["written_at"], limit_s=data["limit_s"], ranks=ranks)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(f"{STATES_FILE} is damaged") from None
        if not all(_is_sound(one) for one in (found, *ranks)):
            raise ConfigError(f"{STATES_FILE} is damaged")
        return found

    @property
    def longest_wait_s(self) -> float:
        """The longest wait [s]."""
        return max((one.wait_s for one in self.ranks if one.wait_s is not None), default=0.0)

    @property
    def is_late(self) -> bool:
        """Whether a wait lasts longer than steps explain."""
        return self.longest_wait_s > max(LEAST_LATE_S, self.limit_s or 0.0)

    def late_ranks(self) -> tuple[int, ...]:
        """Return the ranks that others wait for, longer than steps explain; () where nobody does, or all are alike.

        >>> one = dict(pid=1, step=3, phase="forward", progress_s=9.0, collective="", num_waits=4, rss_bytes=0)
        >>> waits = RankActivity(**one | dict(wait_s=8.0, num_waits=5)); works = RankActivity(**one, wait_s=None)
        >>> RankStates(written_at=0.0, limit_s=None, ranks=(waits, works, waits)).late_ranks()
        (1,)
        """
        if not self.is_late:
            return ()
        working = tuple(rank for rank, one in enumerate(self.ranks) if one.wait_s is None)
        if working:
            return working
        fewest = min(one.num_waits for one in self.ranks)
        behind = tuple(rank for rank, one in enumerate(self.ranks) if one.num_waits == fewest)
        return behind if len(behind) < len(self.ranks) else ()


def _is_sound(value: RankActivity | RankStates) -> bool:
    """Tell whether the fields are of their types: the file may be anybody's."""
    if isinstance(value, RankStates):
        return _is_number(value.written_at) and (value.limit_s is None or _is_number(value.limit_s))
    counts = (value.pid, value.step, value.num_waits, value.rss_bytes)
    texts = (value.phase, value.collective, value.host)
    return (
        all(type(one) is int and abs(one) < 2**62 for one in counts)
        and all(_is_text(one) for one in texts)
        and _is_number(value.progress_s)
        and (value.wait_s is None or _is_number(value.wait_s))
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) < 1e18
