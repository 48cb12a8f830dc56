"""Several groups and several operations at once: overlapping groups, meshes, barriers, what is left when groups go."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.collectives import KINDS, Call, Job, prepare
from tests.transport.values import Report, assert_reports, values
from torch.distributed.device_mesh import init_device_mesh

from meshwright import testing

# Beside each other in one flight: small ones overtake large ones if they can.
SIZES = ((3,), (30_000,), (0,), (1237,), (120_000,))


def _flight(seed: int, kinds: Sequence[str]) -> list[Call]:
    return [
        Call(kind=kind, shape=SIZES[(seed + number) % len(SIZES)], dtype=torch.int64, seed=100 * seed + number)
        for number, kind in enumerate(kinds)
    ]


KINDS_HERE = [kind for kind in KINDS if backends.gloo_takes(Call(kind=kind, shape=(1,), dtype=torch.int64))]


def _start(calls: Sequence[Call], group: dist.ProcessGroup) -> list[tuple[Job, dist.Work]]:
    jobs = [prepare(call, group.size(), group.rank()) for call in calls]
    return [(job, job.start(group, True)) for job in jobs]


def _finish(report: Report, started: Sequence[tuple[Job, dist.Work]], label: str) -> None:
    for job, work in started:
        work.wait()
        job.check(report, f"{label}: {job.call}")


def _reverse_waits() -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        for seed in range(4):
            _finish(report, _start(_flight(seed, KINDS_HERE), group)[::-1], f"flight {seed}")
    return report


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_many_in_flight_and_waited_for_in_reverse(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_reverse_waits, num_ranks), at_least=num_ranks * 4 * len(KINDS_HERE))


def _other_order() -> Report:
    """Two groups share all or most ranks; every second rank issues on the second one first."""
    report = Report()
    me, world = dist.get_rank(), list(range(dist.get_world_size()))
    with backends.groups_of([world, world[1:], world]) as groups:
        for seed in range(6):
            mine = [(index, group) for index, group in enumerate(groups) if group is not None]
            order = mine if (me + seed) % 2 == 0 else mine[::-1]
            started = {index: _start(_flight(seed + index, KINDS_HERE[:6]), group) for index, group in order}
            for index in started if me % 3 else reversed(started):
                _finish(report, started[index], f"round {seed}, group {index}")
    return report


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_overlapping_groups_in_another_order_on_every_rank(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_other_order, num_ranks), at_least=num_ranks * 6 * 6)


def _unequal_work() -> Report:
    """Groups beside each other do different amounts of work, and meet in the world only at the end."""
    report = Report()
    rank = dist.get_rank()
    with backends.groups_of([[0, 1], [2, 3, 4], [5, 6, 7], range(8)]) as (*parts, world):
        for index, group in enumerate(parts):
            for seed in range(3 * index if group is not None else 0):
                _finish(report, _start(_flight(seed, KINDS_HERE), group), f"part {index}, flight {seed}")
        total = torch.tensor([rank])
        dist.all_reduce(total, group=world)
        report.equal("sum of the ranks", total.item(), 28)
    return report


def test_groups_beside_each_other() -> None:
    assert_reports(testing.run_ranks(_unequal_work, 8), at_least=8)


def _two_threads() -> Report:
    """Each of two threads has a group of its own."""
    report = Report()
    with backends.groups_of([range(3), range(3)]) as groups:
        results: list[Report] = [Report(), Report()]

        def work(index: int) -> None:
            for seed in range(5):
                _finish(results[index], _start(_flight(seed + index, KINDS_HERE), groups[index]), f"thread {index}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        report.true("threads are done", not any(thread.is_alive() for thread in threads))
        for result in results:
            report.checks += result.checks
            report.failures += result.failures
    return report


def test_two_threads_with_a_group_each() -> None:
    assert_reports(testing.run_ranks(_two_threads, 3), at_least=3 * 2 * 5 * len(KINDS_HERE))


def _mesh() -> Report:
    report = Report()
    names = ("a", "b", "c")
    override = dict.fromkeys(names, backends.BACKEND)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names, backend_override=override)
    rank = dist.get_rank()
    coordinate = [rank // 4, rank // 2 % 2, rank % 2]
    report.equal("coordinate", list(mesh.get_coordinate()), coordinate)
    for dim, name in enumerate(names):
        group = mesh.get_group(name)
        report.equal(f"backend along {name}", group._get_backend(torch.device("cpu")).name(), backends.BACKEND)
        stride = 4 >> dim
        others = sorted({rank, rank ^ stride})
        report.equal(f"ranks along {name}", dist.get_process_group_ranks(group), others)
        report.equal(f"place along {name}", group.rank(), coordinate[dim])
        _finish(report, _start(_flight(dim + others[0], KINDS_HERE), group), f"along {name}")
    # A sum along each dimension in turn is the sum over all.
    total = values([rank], (1000,), torch.int64)
    for name in names:
        dist.all_reduce(total, group=mesh.get_group(name))
    report.bits("sum over all", total, sum(values([r], (1000,), torch.int64) for r in range(8)))
    dist.barrier()
    for name in names:
        dist.destroy_process_group(mesh.get_group(name))
    dist.barrier()
    return report


def test_a_mesh_of_three_dimensions() -> None:
    assert_reports(testing.run_ranks(_mesh, 8), at_least=8 * 3 * len(KINDS_HERE))


def _barriers(directory: str, kind: str) -> Report:
    """Every rank leaves a file before it enters: whoever comes out has to see the files of all."""
    report = Report()
    source = torch.Generator().manual_seed(dist.get_rank())
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        for round_ in range(15):
            square = torch.ones(int(torch.randint(1, 300, (), generator=source)), 300)
            (square @ square.T).sum()  # so that another rank is the last one every time
            Path(directory, f"{round_}-{group.rank()}").touch()
            if kind == "monitored":
                group.monitored_barrier(datetime.timedelta(seconds=20), wait_all_ranks=bool(round_ % 2))
            elif kind == "asynchronous":
                dist.barrier(group=group, async_op=True).wait()
            else:
                dist.barrier(group=group)
            there = {name for name in os.listdir(directory) if name.startswith(f"{round_}-")}
            report.equal(f"round {round_}", len(there), group.size())
    return report


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["plain", "asynchronous", "monitored"])
def test_nobody_leaves_a_barrier_before_the_last_has_come(num_ranks: int, kind: str, tmp_path: Path) -> None:
    assert_reports(testing.run_ranks(_barriers, num_ranks, str(tmp_path), kind), at_least=15 * num_ranks)


def _missing_rank() -> str:
    """Rank 2 does not come. Returns what the others are told."""
    text = ""
    group = backends.new_group(range(3))
    if dist.get_rank() != 2:
        try:
            group.monitored_barrier(datetime.timedelta(seconds=0.5), wait_all_ranks=False)
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    dist.destroy_process_group(group)
    return text


def test_a_monitored_barrier_names_the_rank_that_is_missing() -> None:
    first, second, third = testing.run_ranks(_missing_rank, 3)
    assert "Rank 2" in first or "rank 2" in first, first
    assert second, "rank 1 came out of the barrier as if all had come"
    assert third == ""


def _come_and_go(rounds: int) -> tuple[Report, int]:
    """Groups are made, used and destroyed; returns how many files this process has open in the end."""
    report = Report()
    num = dist.get_world_size()
    for round_ in range(rounds):
        ranks = [range(num), range(num - 1), range(1, num)]
        with backends.groups_of(ranks) as groups:
            for index, group in enumerate(groups):
                if group is not None:
                    _finish(report, _start(_flight(round_ + index, ["all_reduce", "all_gather"]), group), f"{round_}")
    return report, _num_open()


def _num_open() -> int:
    """Count open files but for those of /proc, which a rank's pulse reads for a moment, and this function too."""
    targets: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(not target.startswith("/proc/") for target in targets)


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("meshwright" in line for line in file)


def _open_things(rounds: int) -> tuple[Report, int, int, int]:
    report, files = _come_and_go(rounds)
    return report, files, _mappings(), threading.active_count()


def test_groups_that_go_leave_nothing() -> None:
    before = backends.shared_memory_names()
    few = testing.run_ranks(_open_things, 3, 2)
    many = testing.run_ranks(_open_things, 3, 12)
    assert_reports([entry[0] for entry in few + many], at_least=3 * 14 * 2)
    for rank, (first, second) in enumerate(zip(few, many, strict=True)):
        # gloo closes its connections when its threads get to it; ours has nothing to wait for.
        slack = 12 if backends.IS_GLOO else 0
        assert second[1] <= first[1] + slack, f"rank {rank} has {second[1]} files open, after fewer groups {first[1]}"
        assert second[2:] == first[2:], (
            f"rank {rank}: mappings and threads {second[2:]}, after fewer groups {first[2:]}"
        )
    assert backends.shared_memory_names() <= before


def _twice(seed: int) -> Report:
    report = Report()
    with backends.groups_of([range(2), range(2)]) as (first, second):
        calls = _flight(seed, KINDS_HERE)
        other = [dataclasses.replace(call, seed=call.seed + 50) for call in calls]
        one, two = _start(calls, first), _start(other, second)
        _finish(report, two, "second")
        _finish(report, one, "first")
    return report


def test_two_groups_of_the_same_ranks_do_not_mix() -> None:
    assert_reports(testing.run_ranks(_twice, 2, 7), at_least=2 * 2 * len(KINDS_HERE))
