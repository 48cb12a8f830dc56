"""Finding: a difference between what ranks hold or compute and what one device would."""

from __future__ import annotations

import dataclasses

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference that a sentinel has found on this rank."""

    part: str
    """FQN of the module or parameter; a word such as "batch" or "loss" where it is neither."""
    difference: float
    """Largest difference of an entry, relative to the largest entry of what one device computes."""
    tolerance: float
    """What would have been allowed for the dtype."""
    text: str
    """What was compared with what, in one sentence without the numbers."""
