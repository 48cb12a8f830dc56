"""Words that the ranks of a job tell each other through its store, and what follows from them."""

from __future__ import annotations

import dataclasses

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What a rank has told last."""

    count: int
    step: int
    phase: str
    exchange: str
    """What it waits in; "" where it does not wait."""
    waiting_s: float
    end: str
    """Why it tells nothing more; "" while it does."""
    peer: int | None
    """Which rank it has found at fault."""
    pid: int
    rss_bytes: int
    progress_s: float
    """Since its last progress [s]."""
    num_waits: int

    def where(self) -> str:
        """Return the step and the phase that it was in."""
        return f"phase {self.phase}" if self.step < 0 else f"step {self.step}, phase {self.phase}"


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that an exchange lacks."""

    ranks: tuple[int, ...]
    text: str
    silent: tuple[int, ...] = ()
    """Those that tell nothing more, though they may live."""
    working: tuple[int, ...] = ()
    """Those that live and are in no exchange: they end when they read that they were given up."""

    @property
    def peer(self) -> int | None:
        """The first of them; None where none is known."""
        return self.ranks[0] if self.ranks else None
