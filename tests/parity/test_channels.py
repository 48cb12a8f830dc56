"""Pipelines through channels, which GPUs need: the numbers, and the order of messages, on which NCCL relies."""

from __future__ import annotations

import pytest
from tests.parity.harness import Setting, reference
from tests.parity.jobs.channel_jobs import Orders, run_through_channels
from tests.tolerances import FLOAT64

import meshwright as mw
from meshwright import testing
from meshwright.apply.pipeline.channels import number_channels

CELLS = [
    ("gpt", "pp=2", 4),
    ("gpt", "pp=2,schedule=zbv", 4),  # gradients of one layer and outputs of another go the same way
    ("tied", "pp=4", 6),  # a tensor that skips a stage
    ("tied", "pp=2,schedule=zbv", 5),
    ("lstm", "pp=2,schedule=interleaved,virtual=2", 4),
    ("resnet", "pp=3,schedule=zb-h1", 5),
]


@pytest.mark.parametrize(("name", "plan", "micro_batches"), CELLS)
def test_messages_of_a_channel_come_in_the_order_in_which_they_are_sent(
    name: str, plan: str, micro_batches: int
) -> None:
    setting = Setting(num_samples=7, micro_batches=micro_batches)
    per_rank = testing.run_ranks(run_through_channels, mw.Plan.parse(plan).num_ranks, name, plan, setting)
    testing.assert_parity(per_rank[0][0], reference(name, setting), FLOAT64)
    sent, received = _of("send", per_rank), _of("receive", per_rank)
    assert sent
    assert received == sent


def _of(kind: str, per_rank: list[tuple[list[testing.StepRecord], Orders]]) -> Orders:
    return {key[1:]: tags for _, orders in per_rank for key, tags in orders.items() if key[0] == kind}  # type: ignore[misc]


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 1, 2] * 3])
def test_a_channel_has_one_way_between_two_ranks(ranks: list[int]) -> None:
    channels = number_channels(ranks)
    stages = range(len(ranks))
    assert set(channels) == {(one, other) for one in stages for other in stages if ranks[one] != ranks[other]}
    pairs = [(number, frozenset((ranks[one], ranks[other]))) for (one, other), number in channels.items()]
    assert len(pairs) == len(set(pairs))
