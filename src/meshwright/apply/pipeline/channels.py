"""Channels between the stages of a pipeline on GPUs: NCCL delivers in order, knows no tags, and blocks until both sides came.

One group of ranks has one queue for each pair of them, in which a message waits for every earlier one of either direction.
Two stages that send to each other at once would wait for ever, and a rank that takes a later message first would get the
earlier one's numbers. So each way from stage to stage has a queue of its own, in which micro-batches come in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from meshwright.comm.communicator import Communicator

__all__: list[str] = []


def number_channels(ranks: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return (source, target) -> the number of its group, for all stages on different ranks.

    In a group, two ranks have at most one way, and it has one direction. A gradient's source is the later stage.

    Args:
        ranks: The rank of each stage.

    >>> number_channels([0, 1])
    {(0, 1): 0, (1, 0): 1}
    """
    place = [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]
    numbers: dict[tuple[int, int, bool, bool], int] = {}
    found: dict[tuple[int, int], int] = {}
    for source, target in itertools.permutations(range(len(ranks)), 2):
        if ranks[source] != ranks[target]:
            key = place[source], place[target], source < target, ranks[source] < ranks[target]
            found[source, target] = numbers.setdefault(key, len(numbers))
    return found


def open_channels(
    ranks: Sequence[int], own: int, device: torch.device, make_group: Callable[[int], Communicator]
) -> dict[tuple[int, int], Communicator]:
    """Return (source, target) -> its group; every rank of the world calls it.

    The first message of two ranks lets their hosts wait for each other, so each way has one here, in an order that all ranks
    share: in a step, ranks would wait in a circle.

    Args:
        ranks: The rank of each stage.
        own: This rank, as one of those.
        device: This rank's device.
        make_group: Number -> a group of the pipeline's ranks of its own.
    """
    numbers = number_channels(ranks)
    groups = [make_group(number) for number in range(1 + max(numbers.values(), default=-1))]
    empty = torch.zeros(1, dtype=torch.uint8, device=device)
    for (source, target), number in sorted(numbers.items(), key=lambda item: (item[1], item[0])):
        group = groups[number]
        with group.ledger.of_checks():
            if ranks[source] == own:
                group.send(empty, ranks[target], 0).wait()
            elif ranks[target] == own:
                group.receive(empty, ranks[source], 0)
    return {route: groups[number] for route, number in numbers.items()}
