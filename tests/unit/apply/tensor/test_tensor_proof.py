"""Proofs of code that does not do the same on each shard: they end at once, and nothing is proven."""

from __future__ import annotations

import threading

import pytest
from tests.unit.apply.tensor.tensor_type_cases import PAIR, Between, experiment_of
from torch import Tensor

from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError


class _Counting(Between):
    """A pair of layers that runs twice in every second thread that comes to it.

    Args:
        threads: Those that came, in order.
    """

    def __init__(self, threads: list[int]) -> None:
        super().__init__(lambda _, h: h.relu())
        self.place = lambda: _place_of_this_thread(threads)  # copies share what a function closes over

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.place() % 2):
            x = super().forward(x)
        return x


def _place_of_this_thread(threads: list[int]) -> int:
    own = threading.get_ident()
    if threading.current_thread() is threading.main_thread():
        return 0
    if own not in threads:
        threads.append(own)
    return threads.index(own)


@pytest.mark.timeout(30)
def test_a_shard_that_exchanges_more_often_than_another_waits_for_none() -> None:
    experiment = experiment_of(_Counting([]))
    with pytest.raises(DisprovedError, match=r"exchange different things.*'end'|result 0 differs"):
        experiment.prove(PAIR)
