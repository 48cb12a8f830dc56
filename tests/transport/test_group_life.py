"""Groups that end inside a callback, are split, or wait in the public monitored barrier; receives by the thousand."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.values import Report, assert_reports

from meshwright import testing


def _destroyed_in_callback(kind: str, waits: bool) -> Report:
    report = Report()
    for round_ in range(6):
        group = backends.new_group(range(dist.get_world_size()))
        assert group is not None
        found: list[str] = []
        done = threading.Event()

        # The function must not keep the group itself: what it destroys may be the last reference.
        def destroy(future: Any, box: list[Any], found: list[str] = found, done: threading.Event = done) -> None:
            try:
                future.value()
                dist.destroy_process_group(box.pop())
                found.append("destroyed")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
            done.set()

        box: list[Any] = [group]
        data = torch.full((1000 * round_ + 1,), group.rank() + 1.0)
        if kind == "collective":
            work = dist.all_reduce(data, group=group, async_op=True)
        elif group.rank() == 0:
            work = dist.isend(data, group_dst=1, group=group)
        else:
            work = dist.irecv(data, group_src=0, group=group)
        assert work is not None
        del group
        work.get_future().then(lambda future, box=box, destroy=destroy: destroy(future, box))
        if waits:
            work.wait()
        report.true("called back", done.wait(20.0))
        report.equal("in the callback", found, ["destroyed"])
        report.equal("value", float(data[0]), 3.0 if kind == "collective" else 1.0)
        del work
        dist.barrier()
    return report


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_callback_may_destroy_its_group(kind: str, waits: bool) -> None:
    assert_reports(testing.run_ranks(_destroyed_in_callback, 2, kind, waits), at_least=36)


def _split() -> Report:
    report = Report()
    me, num = dist.get_rank(), dist.get_world_size()
    with backends.groups_of([range(num)]) as (group,):
        assert group is not None
        for ranks in ([0, 2], [2, 1], [0, 1, 2]):
            part = group.split_group(ranks, timeout=datetime.timedelta(seconds=20))
            report.equal(f"{ranks} has this rank", part is not None, me in ranks)
            if part is None:
                continue
            report.equal("rank and size", (part.rank(), part.size()), (ranks.index(me), len(ranks)))
            data = torch.full((5,), me + 1.0)
            part.allreduce([data]).wait()
            report.equal(f"sum over {ranks}", data.tolist(), [sum(rank + 1.0 for rank in ranks)] * 5)
            if not backends.IS_GLOO:
                report.equal("backend", part._get_backend(torch.device("cpu")).name(), "shm")
            part.shutdown()
    return report


def test_a_group_can_be_split() -> None:
    assert_reports(testing.run_ranks(_split, 3), at_least=24)


def _public_monitored_barrier() -> tuple[str, str]:
    group = backends.new_group(range(3))
    dist.monitored_barrier(group)
    dist.monitored_barrier(group, datetime.timedelta(seconds=20), wait_all_ranks=True)
    first = third = ""
    if dist.get_rank() != 2:
        try:
            dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=0.5))
        except RuntimeError as error:
            first = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    pair = backends.new_group([0, 1])
    if pair is not None:
        dist.monitored_barrier(pair)
        dist.destroy_process_group(pair)
    else:
        with pytest.warns(UserWarning, match="not a member|not in the group|does not belong"):
            dist.monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER)
        third = "outside"
    return first, third


def test_the_public_monitored_barrier_names_who_is_missing() -> None:
    found = testing.run_ranks(_public_monitored_barrier, 3)
    assert "rank 2" in found[0][0].lower(), found
    assert found[1][0], "rank 1 came out of the barrier as if all had come"
    assert found[2] == ("", "outside")


def _thousands(count: int) -> Report:
    report = Report()
    with backends.groups_of([range(2)]) as (group,):
        assert group is not None
        if group.rank() == 0:
            for work in [dist.isend(torch.tensor([tag]), group_dst=1, group=group, tag=tag) for tag in range(count)]:
                assert work is not None
                work.wait()
        else:
            room = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
            # The last one sent is asked for first; every third from whoever sends it.
            works = [
                dist.irecv(room[tag], group_src=None if tag % 3 == 0 else 0, group=group, tag=tag)
                for tag in reversed(range(count))
            ]
            for work in works:
                assert work is not None
                work.wait()
            report.equal("values", torch.cat(room).tolist(), list(range(count)))
    return report


@pytest.mark.skipif(backends.IS_GLOO, reason="a receive from any source is the only one of its kind at a time")
def test_thousands_of_receives_in_reverse() -> None:
    assert_reports(testing.run_ranks(_thousands, 2, 3000), at_least=1)
