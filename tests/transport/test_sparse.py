"""Sparse tensors: their sum over ranks with different entries, and DDP with embeddings that have sparse gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.values import Report, assert_reports
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright import testing


def _part(
    member: int, dense: tuple[int, ...], dtype: torch.dtype, count: int, shape: tuple[int, ...] = (50, 7)
) -> torch.Tensor:
    """A tensor of this shape and dense dims; not coalesced, and without an entry where `count` is 0."""
    generator = torch.Generator().manual_seed(member * 7 + count)
    where = torch.stack([torch.randint(0, size, (count,), generator=generator) for size in shape])
    entries = torch.randint(-9, 9, (count, *dense), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(where, entries, (*shape, *dense), check_invariants=True)


def _sums() -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        assert group is not None
        for dtype in (torch.float32, torch.float64, torch.int64):
            for dense in ((), (3,)):
                for counts in ((5, 9, 30), (0, 4, 4), (0, 0, 0), (60_000, 3, 0)):
                    for is_async in (False, True):
                        mine = _part(group.rank(), dense, dtype, counts[group.rank()])
                        work = dist.all_reduce(mine, group=group, async_op=is_async)
                        if work is not None:
                            work.wait()
                        parts = [
                            _part(member, dense, dtype, counts[member]).to_dense() for member in range(group.size())
                        ]
                        report.bits(f"{dtype} {dense} {counts}", mine.to_dense(), sum(parts[1:], parts[0]))
                        report.true("coalesced", mine.is_coalesced())
    return report


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_of_sparse_tensors(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_sums, num_ranks), at_least=num_ranks * 96)


def _large_sums() -> Report:
    report = Report()
    with backends.groups_of([range(2)]) as (group,):
        assert group is not None
        for counts in ((200_000, 7), (3, 150_000), (120_000, 120_000)):
            parts = [_part(member, (), torch.float64, counts[member], (2000, 300)) for member in range(2)]
            mine = parts[group.rank()].clone()
            dist.all_reduce(mine, group=group)
            report.bits(f"{counts}", mine.to_dense(), parts[0].to_dense() + parts[1].to_dense())
    return report


def test_the_sum_of_sparse_tensors_larger_than_a_slot() -> None:
    assert_reports(testing.run_ranks(_large_sums, 2), at_least=6)


def _refused() -> Report:
    report = Report()
    with backends.groups_of([range(2)]) as (group,):
        assert group is not None
        odd = group.rank() == 1
        cases = {
            "shape": _part(0, (3,) if odd else (2,), torch.float32, 4),
            "dtype": _part(0, (), torch.float64 if odd else torch.float32, 4),
            "dense": torch.ones(9) if odd else _part(0, (), torch.float32, 4),
        }
        for name, mine in cases.items():
            try:
                dist.all_reduce(mine, group=group)
                report.true(name, False, "it was not refused")
            except RuntimeError as error:
                report.true(name, "the ranks do not agree" in str(error), error)
        try:
            dist.all_reduce(_part(0, (), torch.float32, 4), op=dist.ReduceOp.MAX, group=group)
            report.true("max", False, "it was not refused")
        except RuntimeError as error:
            report.true("max", "sum only" in str(error), error)
        try:
            dist.all_reduce(_part(0, (), torch.complex64, 4), group=group)
            report.true("complex", False, "it was not refused")
        except RuntimeError as error:
            report.true("complex", "keeps its own entries" in str(error), error)
    return report


@pytest.mark.skipif(backends.IS_GLOO, reason="gloo waits for its timeout where ranks disagree")
def test_sparse_tensors_that_do_not_agree() -> None:
    assert_reports(testing.run_ranks(_refused, 2), at_least=10)


def _average(group, bucket):  # without annotations: torch compares them with its own types, and here they are text
    """A communication hook as users write it: the future's value is the sum, whose entries are not the input's."""
    work = dist.all_reduce(bucket.buffer() / group.size(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _trained(group: dist.ProcessGroup | None, rows: torch.Tensor, *, hooked: bool = False) -> torch.Tensor:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)).double()
    net = model if group is None else DistributedDataParallel(model, process_group=group)
    if isinstance(net, DistributedDataParallel) and hooked:
        net.register_comm_hook(group, _average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _ddp(hooked: bool) -> Report:
    report = Report()
    with backends.groups_of([range(2)]) as (group,):
        assert group is not None
        rows = torch.arange(24).reshape(2, 12) % 20
        found, expected = _trained(group, rows[group.rank()], hooked=hooked), _trained(None, rows)
        report.close("parameters", found, expected, torch.full_like(expected, 1e-12))
    return report


@pytest.mark.parametrize("hooked", [False, True])
def test_ddp_with_sparse_embeddings_trains_as_one_process(hooked: bool) -> None:
    assert_reports(testing.run_ranks(_ddp, 2, hooked), at_least=2)
