"""torch.distributed.nn.functional: collectives that autograd goes back through.

Deprecated, but in use; and the one place where torch takes other collectives for a group by the name of its backend.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed
from tests.transport_torch.harness import Numbers, assert_same_numbers, make_group

SHAPE = (6, 3)  # dim 0 divides by 2 and by 3


def _all_to_all_single(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # Rank r gets r + 1 rows from everybody, so what a rank sends is unequal, and so is what ranks get.
    rank, num_ranks = group.rank(), group.size()
    sent = [peer + 1 for peer in range(num_ranks)]
    rows = x.repeat(2, 1)[: sum(sent)]
    return distributed.all_to_all_single(
        torch.empty(num_ranks * (rank + 1), SHAPE[1], dtype=x.dtype), rows, [rank + 1] * num_ranks, sent, group
    )


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = list(x.chunk(group.size()))
    return torch.cat(distributed.all_to_all([torch.empty_like(part) for part in parts], parts, group))


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size())]
    return distributed.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)


def _scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return distributed.scatter([part.contiguous() for part in x.chunk(group.size())], src=1, group=group)


CALLS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]] = {
    "broadcast": lambda x, group: distributed.broadcast(x, 1, group),
    # On other ranks than the one that asks, what is left in the tensor is nothing in particular.
    "reduce": lambda x, group: distributed.reduce(x, 1, group=group) * (group.rank() == 1),
    "all_reduce": lambda x, group: distributed.all_reduce(x, group=group),
    "all_gather": lambda x, group: torch.cat(distributed.all_gather(x, group)),
    "gather": lambda x, group: torch.cat(distributed.gather(x, 1, group)),
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}


def go_there_and_back(backend: str, call: str) -> Numbers:
    """Return a collective's result, and the gradient of a weighted sum of all of its results."""
    group = make_group(backend)
    x = _input(group.rank()).requires_grad_()
    # Squared, so that the gradient is not the same everywhere.
    result = CALLS[call](x * 1.5, group)
    (result**2).sum().backward()
    assert x.grad is not None
    return {"result": result.detach().clone(), "gradient": x.grad}


def _input(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_go_back_through_collectives(call: str, num_ranks: int) -> None:
    per_rank = assert_same_numbers(go_there_and_back, num_ranks, call)
    scaled = torch.stack([1.5 * _input(rank) for rank in range(num_ranks)])
    total, ranks = scaled.sum(0), range(num_ranks)
    cut = [t.chunk(num_ranks) for t in scaled]
    nothing = torch.zeros_like(total)
    # By rank: the result, and a third of the gradient, as the square and the factor before it make 2 x 1.5.
    expected = {
        "broadcast": [(scaled[1], num_ranks * scaled[1] if rank == 1 else nothing) for rank in ranks],
        "reduce": [(total if rank == 1 else nothing, total) for rank in ranks],
        "all_reduce": [(total, num_ranks * total) for _ in ranks],
        "all_gather": [(scaled.flatten(0, 1), num_ranks * scaled[rank]) for rank in ranks],
        "gather": [(scaled.flatten(0, 1) * (rank == 1), scaled[rank]) for rank in ranks],
        "scatter": [(cut[1][rank], scaled[1] if rank == 1 else nothing) for rank in ranks],
        "reduce_scatter": [(total.chunk(num_ranks)[rank], total) for rank in ranks],
        "all_to_all": [(torch.cat([cut[peer][rank] for peer in ranks]), scaled[rank]) for rank in ranks],
    }
    for rank, numbers in enumerate(per_rank):
        assert numbers["gradient"].isfinite().all()
        if call in expected:
            result, third = expected[call][rank]
            torch.testing.assert_close(numbers["result"], result, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(numbers["gradient"], 3 * third, rtol=1e-12, atol=1e-14)
