"""Groups of ranks: along an axis of a mesh, or by any other partition of the world."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from meshwright.comm.communicator import Communicator
from meshwright.errors import InternalError
from meshwright.ranks.world import World

__all__: list[str] = []


def subgroup(world: World, groups: Sequence[Sequence[int]], axis: str, *, number: int = 0) -> Communicator:
    """Return the communicator of this rank's group. Every rank of the world calls it, with the same groups.

    Groups are created once: the same partition of the world returns the same group, since its connections and shared memory live
    as long as the world.

    Args:
        world: This process's world.
        groups: Every rank of the world once, cut into groups; the ranks of each ascending.
        axis: The name under which the ledger counts.
        number: Above 0, another group of the same ranks, with connections of its own.

    Raises:
        InternalError: The groups do not hold every rank once.
    """
    key = tuple(tuple(group) for group in groups)
    if sorted(rank for group in key for rank in group) != list(range(world.world_size)):
        raise InternalError(f"groups {key} do not hold each of {world.world_size} ranks once")
    mine = next(group for group in key if world.rank in group)
    if len(mine) == world.world_size and not number:
        return world.default_group.over(axis)
    if (key, number) not in world.subgroups:
        world.subgroups[key, number] = _make(world, key, mine)
    return world.subgroups[key, number].over(axis)


def _make(world: World, key: tuple[tuple[int, ...], ...], mine: tuple[int, ...]) -> Communicator:
    default = world.default_group
    made: dist.ProcessGroup | None = None
    for group in key:
        # A group of one exchanges nothing. All ranks create the others in one order, including groups that they are not in.
        if len(group) > 1:
            found = dist.new_group(list(group), timeout=datetime.timedelta(seconds=world.group_timeout_s))
            made = found if group == mine and isinstance(found, dist.ProcessGroup) else made
    communicator = Communicator(made, ranks=mine, rank=world.rank, ledger=world.ledger, timeout_s=default.timeout_s)
    communicator.on_enter, communicator.on_exit = default.on_enter, default.on_exit
    communicator.calls = default.calls
    return communicator
