"""Pipelines whose messages go through channels, as on GPUs, and the order in which each channel's come."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from tests.parity import harness

from meshwright import testing
from meshwright.apply.pipeline.p2p import Post
from meshwright.comm.communicator import Communicator
from meshwright.ranks.world import current_world

Orders = dict[tuple[str, int, int, int], list[int]]
"""(send or receive, group, source, target) -> the tags of its messages, in their order."""


def run_through_channels(name: str, plan: str, setting: harness.Setting) -> tuple[list[testing.StepRecord], Orders]:
    """Train a case as `run_case`, through channels; return the orders, too."""
    found: defaultdict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    numbers: dict[int, int] = {}
    send, receive = Communicator.send, Communicator.receive

    def number_of(group: Communicator) -> int:
        return numbers.setdefault(id(group.process_group), len(numbers))

    def noted_send(self: Communicator, tensor: Any, target: int, tag: int) -> Any:
        found["send", number_of(self), self.group_rank, target].append(tag)
        return send(self, tensor, target, tag)

    def noted_receive(self: Communicator, tensor: Any, source: int, tag: int, **options: Any) -> None:
        found["receive", number_of(self), source, self.group_rank].append(tag)
        receive(self, tensor, source, tag, **options)

    def open_in_order(self: Post, device: Any, make_channel: Any) -> None:
        original(self, device, make_channel)
        numbers.clear()
        found.clear()
        # The order of the numbers, which all ranks share, and not that of a rank's first messages.
        for _, group in sorted(self._channels.items()):
            number_of(group)

    original = Post.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Post, "needs_channels", lambda self, _: self.group.size > 1)
        patch.setattr(Post, "open", open_in_order)
        patch.setattr(Communicator, "send", noted_send)
        patch.setattr(Communicator, "receive", noted_receive)
        records = harness.run_case(name, plan, setting)
    world = current_world()
    return (records if world is None or world.rank == 0 else []), dict(found)
