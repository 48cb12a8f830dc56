"""Groups that are split, and the public monitored barrier."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.values import Report, assert_reports

from meshwright import testing
from meshwright.comm.shm import backend as shm_backend
from meshwright.comm.shm.attach import CannotAttachError


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
            report.equal("rank and size", (part.rank(), part.size()), (sorted(ranks).index(me), len(ranks)))
            data = torch.full((5,), me + 1.0)
            part.allreduce([data]).wait()
            report.equal(f"sum over {ranks}", data.tolist(), [sum(rank + 1.0 for rank in ranks)] * 5)
            report.equal("backend", part._get_backend(torch.device("cpu")).name(), "shm")
            part.shutdown()
    return report


@pytest.mark.skipif(backends.IS_GLOO, reason="the first sum over a part times out over gloo, torch 2.13")
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


def _alone(timeout_s: float) -> str:
    group = backends.new_group(range(3))
    text = ""
    if dist.get_rank() == 0:
        try:
            dist.monitored_barrier(group, datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    return text


@pytest.mark.parametrize(
    ("timeout_s", "words"), [(0.0, "Rank 0 timed out in monitoredBarrier"), (0.2, "Rank 1 failed to pass")]
)
def test_a_monitored_barrier_that_nobody_else_comes_to(timeout_s: float, words: str) -> None:
    text, *_ = testing.run_ranks(_alone, 3, timeout_s)
    assert words in text
    assert ",," not in text
    if not backends.IS_GLOO:
        assert "rank 1 (process" in text
        assert "rank 2 (process" in text


def _replaced_by_gloo() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_backend, "attach", _cannot_attach)
        group = dist.new_group(range(2), backend="shm")
    dist.monitored_barrier(group, datetime.timedelta(seconds=20))
    name = group._get_backend(torch.device("cpu")).name()
    dist.destroy_process_group(group)
    return f"{name} for {dist.Backend.SHM}"


def _cannot_attach(*_: object) -> None:
    raise CannotAttachError("as if on two hosts", is_expected=True)


@pytest.mark.skipif(backends.IS_GLOO, reason="this is about groups that asked for shared memory")
def test_the_public_monitored_barrier_takes_groups_that_got_gloo() -> None:
    assert testing.run_ranks(_replaced_by_gloo, 2) == ["gloo for shm"] * 2
