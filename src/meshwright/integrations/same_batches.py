"""Comparison of the whole batches that ranks have loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.ranks.world import World
from meshwright.run.sentinels.digest import digest_batch

__all__: list[str] = []


def find_other_batches(world: World, batches: Sequence[Any]) -> int | None:
    """Return the first rank whose batches, or their number, are not rank 0's; None where there is none. All ranks call it."""
    mine = [str(digest_batch(batch, whole=True)) for batch in batches]
    told = world.default_group.all_gather_json(mine, device=world.device)
    return next((rank for rank, theirs in enumerate(told) if theirs != told[0]), None)
