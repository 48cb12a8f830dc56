"""Proofs of code that does not do the same on each shard: they end at once, and nothing is proven."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.apply.tensor.tensor_type_cases import PAIR, Between, experiment_of
from torch import Tensor

from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError


class _Counting(Between):
    """A pair of layers that runs twice at every other call in the process."""

    def __init__(self, calls: itertools.count[int]) -> None:
        super().__init__(lambda _, h: h.relu())
        self.calls = lambda: next(calls)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.calls() % 2):
            x = super().forward(x)
        return x


@pytest.mark.timeout(30)
def test_a_shard_that_exchanges_more_often_than_another_waits_for_none() -> None:
    experiment = experiment_of(_Counting(itertools.count()))
    with pytest.raises(DisprovedError, match=r"exchange different things.*'end'"):
        experiment.prove(PAIR)
