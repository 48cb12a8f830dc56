"""Futures of collectives: callbacks run when the work is done, in its order, and may start and await other collectives.

Communication hooks are built on this: PowerSGD's wait inside a callback for a collective that this callback has started.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport_torch.harness import BITWISE, Numbers, assert_same_numbers, make_group


def chain(backend: str, waits_for: str, links: int) -> Numbers:
    """Start each collective in the callback of the one before, which waits for it, and return the last one's result."""
    group = make_group(backend)

    def next_link(future: Any) -> torch.Tensor:
        tensor = future.value()
        tensor = (tensor[0] if isinstance(tensor, list) else tensor) + 1
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if waits_for == "future":
            return work.get_future().wait()[0]
        work.wait()
        return tensor

    first = torch.full((1000,), float(group.rank()), dtype=torch.float64)
    future = dist.all_reduce(first, group=group, async_op=True).get_future()
    for _ in range(links):
        future = future.then(next_link)
    return {"last": future.wait().clone()}


def many(backend: str, number: int) -> Numbers:
    """Start many collectives at once, whose callbacks note in which order they run, and wait for the last one only."""
    group = make_group(backend)
    ended: list[int] = []
    futures = []
    for index in range(number):
        tensor = torch.full((index * 100 + 1,), float(group.rank() + index), dtype=torch.float64)
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        futures.append(future.then(lambda done, index=index: (ended.append(index), done.value()[0])[1]))
    results = [value[:1].clone() for value in torch.futures.wait_all(futures)]
    assert sorted(ended) == list(range(number))
    return {"results": torch.cat(results)}


def fail(backend: str) -> Numbers:
    """Raise in a callback: whoever waits for its result gets the error, and the group goes on."""
    group = make_group(backend)

    def refuse(_future: Any) -> None:
        raise LookupError("not today")

    future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(refuse)
    with pytest.raises(RuntimeError, match="not today"):
        future.wait()
    after = torch.ones(3)
    dist.all_reduce(after, group=group)
    return {"after": after}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("links", [1, 3])
@pytest.mark.parametrize("waits_for", ["future", "work"])
def test_a_callback_may_wait_for_a_collective_that_it_starts(waits_for: str, links: int, num_ranks: int) -> None:
    per_rank = assert_same_numbers(chain, num_ranks, waits_for, links, tolerance=BITWISE)
    expected = sum(range(num_ranks))
    for _ in range(links):
        expected = num_ranks * (expected + 1)
    for numbers in per_rank:
        assert numbers["last"].unique().tolist() == [expected]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_many_collectives_have_callbacks_at_once(num_ranks: int) -> None:
    per_rank = assert_same_numbers(many, num_ranks, 20, tolerance=BITWISE)
    for numbers in per_rank:
        assert numbers["results"].tolist() == [sum(rank + index for rank in range(num_ranks)) for index in range(20)]


def test_an_error_in_a_callback_is_that_callbacks_own() -> None:
    for numbers in assert_same_numbers(fail, 2, tolerance=BITWISE):
        assert numbers["after"].tolist() == [2.0] * 3
