"""Calls that name no rank of the group, mix dtypes or split below zero: refused before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.collectives import gather_single, reduce_scatter_single
from tests.transport.values import Report, assert_reports

from meshwright import testing

pytestmark = pytest.mark.skipif(backends.IS_GLOO, reason="gloo crashes at some of these")

Group = dist.ProcessGroup


def _outside(group: Group, num: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for root in (num, num + 3, -1, -5, 255, 256):
        ones, room = torch.ones(5), [torch.zeros(5) for _ in range(num)]
        broadcast, reduce = dist.BroadcastOptions(), dist.ReduceOptions()
        gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
        for options in (broadcast, reduce, gather, scatter):
            options.rootRank = root
        yield f"broadcast {root}", lambda ones=ones, o=broadcast: group.broadcast([ones], o).wait()
        yield f"reduce {root}", lambda ones=ones, o=reduce: group.reduce([ones], o).wait()
        yield f"gather {root}", lambda ones=ones, room=room, o=gather: group.gather([room], [ones], o).wait()
        yield f"scatter {root}", lambda ones=ones, room=room, o=scatter: group.scatter([ones], [room], o).wait()
        yield f"send {root}", lambda ones=ones, root=root: group.send([ones], root, 0).wait()
        yield f"recv {root}", lambda ones=ones, root=root: group.recv([ones], root, 0).wait()
    options = dist.BroadcastOptions()
    options.rootTensor = 1
    yield "root tensor", lambda: group.broadcast([torch.ones(5)], options).wait()
    yield "negative tag", lambda: group.send([torch.ones(5)], 0, -3).wait()


def _mixed(group: Group, num: int) -> Iterator[tuple[str, Callable[[], object]]]:
    # The group's own calls: some of torch's functions refuse before they come to it.
    f32, f64, i32 = torch.ones, lambda n: torch.ones(n, dtype=torch.float64), lambda n: torch.ones(n, dtype=torch.int32)
    yield "all_gather tensor", lambda: gather_single(i32(3 * num), f32(3), group=group)
    yield "all_gather tensor, wider", lambda: gather_single(f32(4 * num), f64(2), group=group)
    yield "all_gather", lambda: group.allgather([[i32(3) for _ in range(num)]], [f32(3)]).wait()
    yield "all_gather, one of them", lambda: group.allgather([[f32(3)] * (num - 1) + [i32(3)]], [f32(3)]).wait()
    yield "all_gather_coalesced", lambda: group.allgather_coalesced([[i32(3)] for _ in range(num)], [f32(3)]).wait()
    yield "reduce_scatter tensor", lambda: reduce_scatter_single(f64(2), f32(4 * num), group=group)
    yield "reduce_scatter", lambda: group.reduce_scatter([i32(3)], [[f32(3) for _ in range(num)]]).wait()
    yield "all_to_all", lambda: group.alltoall([i32(1)] * num, [f32(1)] * num).wait()
    yield "all_to_all tensor", lambda: group.alltoall_base(i32(num), f32(num), [], []).wait()
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank = scatter.rootRank = group.rank()  # each is the root, so that each refuses
    yield "gather", lambda: group.gather([[i32(3) for _ in range(num)]], [f32(3)], gather).wait()
    yield "scatter", lambda: group.scatter([i32(3)], [[f32(3) for _ in range(num)]], scatter).wait()


def _splits(group: Group, num: int) -> Iterator[tuple[str, Callable[[], object]]]:
    odd, even = [-2, 6] + [0] * (num - 2), [2, 2] + [0] * (num - 2)
    yield "inputs", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), even, odd, group=group)
    yield "outputs", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), odd, even, group=group)
    own = group._get_backend(torch.device("cpu"))
    yield "nothing", lambda: own.allreduce_coalesced([], dist.AllreduceCoalescedOptions()).wait()


_KINDS = {"outside": (_outside, 38), "mixed": (_mixed, 11), "splits": (_splits, 3)}


def _refused(kind: str) -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        assert group is not None
        for name, call in _KINDS[kind][0](group, group.size()):
            try:
                call()
                report.true(name, False, "it was not refused")
            except (RuntimeError, ValueError) as error:
                report.true(name, "rule" in str(error) or "at least one" in str(error), error)
        total = torch.full((7,), group.rank() + 1.0)
        dist.all_reduce(total, group=group)
        report.equal("afterwards", total.tolist(), [group.size() * (group.size() + 1) / 2] * 7)
    return report


@pytest.mark.parametrize("kind", list(_KINDS))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_refused_before_anything_moves(kind: str, num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_refused, num_ranks, kind), at_least=num_ranks * _KINDS[kind][1])


def _coalesced(num_tensors: int, alike: bool) -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        assert group is not None
        num = group.size()

        def part(member: int, index: int) -> torch.Tensor:
            return torch.arange(3.0 if alike else 3.0 + index) + 100 * member + 10 * index

        room = [[torch.zeros_like(part(0, index)) for index in range(num_tensors)] for _ in range(num)]
        mine = [part(group.rank(), index) for index in range(num_tensors)]
        group.allgather_coalesced(room, mine).wait()
        for member in range(num):
            for index in range(num_tensors):
                report.bits(f"{member}, {index}", room[member][index], part(member, index))
    return report


@pytest.mark.parametrize(
    ("num_ranks", "num_tensors", "alike"), [(2, 2, True), (3, 3, True), (2, 3, False), (3, 1, True)]
)
def test_all_gather_coalesced_is_not_transposed(num_ranks: int, num_tensors: int, alike: bool) -> None:
    reports = testing.run_ranks(_coalesced, num_ranks, num_tensors, alike)
    assert_reports(reports, at_least=num_ranks * num_ranks * num_tensors)
