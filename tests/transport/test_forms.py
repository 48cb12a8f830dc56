"""The other forms of the same operations: coalesced, functional, with objects, with futures; and what is built on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.transport import backends
from tests.transport.collectives import Call, gather_single, prepare, reduce_scatter_single
from tests.transport.values import Report, assert_reports, reduced, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright import testing

DTYPES = (torch.float64, torch.bfloat16, torch.int32)
SHAPES = ((0,), (1,), (1237,), (33_000,))


def _in_group(body: Callable[[dist.ProcessGroup, int, int, Report], None], ranks: list[int]) -> Report:
    report = Report()
    with backends.groups_of([ranks]) as (group,):
        if group is not None:
            body(group, group.rank(), group.size(), report)
    return report


def _part(member: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # Whole numbers, small enough that every order of adding gives the same: here the form is tested, not the sum.
    return (values([member, index], shape, torch.int8) % 8).to(dtype)


def _sum(num: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return reduced([_part(member, index, shape, dtype) for member in range(num)], "sum")


def _coalesced(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    for dtype in DTYPES:
        for async_ops in (False, True):
            label = f"{dtype} {'async' if async_ops else 'sync'}"
            data = [_part(me, i, shape, dtype) for i, shape in enumerate(SHAPES)]
            with dist._coalescing_manager(group, async_ops=async_ops) as manager:
                for tensor in data:
                    dist.all_reduce(tensor, group=group)
            _wait(manager, async_ops)
            for i, shape in enumerate(SHAPES):
                report.bits(f"all_reduce {label} {shape}", data[i], _sum(num, i, shape, dtype))

            gathered = [torch.full((num * shape[0],), 3, dtype=dtype) for shape in SHAPES]
            with dist._coalescing_manager(group, async_ops=async_ops) as manager:
                for i, shape in enumerate(SHAPES):
                    gather_single(gathered[i], _part(me, i, shape, dtype), group=group)
            _wait(manager, async_ops)
            for i, shape in enumerate(SHAPES):
                expected = torch.cat([_part(member, i, shape, dtype) for member in range(num)])
                report.bits(f"all_gather {label} {shape}", gathered[i], expected)

            scattered = [torch.full(shape, 3, dtype=dtype) for shape in SHAPES]
            with dist._coalescing_manager(group, async_ops=async_ops) as manager:
                for i, shape in enumerate(SHAPES):
                    parts = torch.cat([_part(me, 10 * i + target, shape, dtype) for target in range(num)])
                    reduce_scatter_single(scattered[i], parts, group=group)
            _wait(manager, async_ops)
            for i, shape in enumerate(SHAPES):
                report.bits(f"reduce_scatter {label} {shape}", scattered[i], _sum(num, 10 * i + me, shape, dtype))


def _wait(manager: Any, async_ops: bool) -> None:
    if async_ops:
        manager.wait()


def _functional(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    for dtype in DTYPES:
        shape = (6, 35)
        mine = _part(me, 0, shape, dtype)
        parts = [_part(member, 0, shape, dtype) for member in range(num)]
        total = sum(parts[1:], parts[0])
        report.bits("all_reduce", _done(functional.all_reduce(mine, "sum", group)), total)
        report.bits("all_reduce max", _done(functional.all_reduce(mine, "max", group)), reduced(parts, "max"))
        report.bits("the input", mine, parts[me])
        report.bits("broadcast", _done(functional.broadcast(mine, num - 1, group)), parts[num - 1])
        for dim in (0, 1):
            gathered = _done(functional.all_gather_tensor(mine, dim, group))
            report.bits(f"all_gather along {dim}", gathered, torch.cat(parts, dim))
            scattered = _done(functional.reduce_scatter_tensor(torch.cat([mine] * num, dim), "sum", dim, group))
            report.bits(f"reduce_scatter along {dim}", scattered, total)
        turned = _done(functional.all_reduce(mine.T, "sum", group))
        report.bits("all_reduce of a transposed one", turned, total.T.contiguous())
        both = functional.all_reduce_coalesced([mine, mine[0]], "sum", group)
        report.bits("coalesced, first", _done(both[0]), total)
        report.bits("coalesced, second", _done(both[1]), total[0])
        even = _done(functional.all_to_all_single(torch.cat([mine] * num), None, None, group))
        report.bits("all_to_all", even, torch.cat(parts))
        # Rank r sends r + 1 + t rows to t.
        sent = [_part(me, target, (me + 1 + target, 3), dtype) for target in range(num)]
        received = [_part(source, me, (source + 1 + me, 3), dtype) for source in range(num)]
        splits = [len(part) for part in received], [len(part) for part in sent]
        report.bits("uneven", _done(functional.all_to_all_single(torch.cat(sent), *splits, group)), torch.cat(received))


def _done(tensor: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(tensor).contiguous()


def _functional_gradients(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    mine = _part(me, 0, (4, 5), torch.float64).requires_grad_()
    weights = torch.arange(num * 20.0, dtype=torch.float64).reshape(num * 4, 5) * (me + 1)
    gathered = functional.all_gather_tensor_autograd(mine, 0, group)
    (gathered * weights).sum().backward()
    # Backward of a gather adds up what all ranks want of this one's part.
    rows = torch.arange(num * 20.0, dtype=torch.float64).reshape(num * 4, 5)[me * 4 : me * 4 + 4]
    report.bits("gradient of all_gather", mine.grad, rows * (num * (num + 1) / 2))


def _objects(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    world = dist.get_process_group_ranks(group)

    def thing(member: int) -> dict[str, Any]:
        return {"rank": member, "text": "x" * (member * 5000), "list": [None, 1.5, (member,)]}

    everything = [thing(member) for member in range(num)]
    gathered: list[Any] = [None] * num
    dist.all_gather_object(gathered, thing(me), group=group)
    report.equal("all_gather_object", gathered, everything)
    for root in range(num):
        listed = [thing(root), root, "z"] if me == root else [None] * 3
        dist.broadcast_object_list(listed, src=world[root], group=group)
        report.equal(f"broadcast_object_list from {root}", listed, [thing(root), root, "z"])
        collected: list[Any] | None = [None] * num if me == root else None
        dist.gather_object(thing(me), collected, dst=world[root], group=group)
        report.equal(f"gather_object to {root}", collected, everything if me == root else None)
        output = [None]
        dist.scatter_object_list(output, everything if me == root else None, src=world[root], group=group)
        report.equal(f"scatter_object_list from {root}", output, [thing(me)])


def _futures(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    kinds = ["all_reduce", "broadcast", "all_gather_tensor", "all_to_all_single"]
    if not backends.IS_GLOO:  # gloo has no future for these
        kinds += ["reduce_scatter_tensor", "all_gather", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all"]
    for number, kind in enumerate(kinds):
        job = prepare(Call(kind=kind, shape=(1237,), dtype=torch.int32, seed=number), num, me)
        seen: list[bool] = []
        future = job.start(group, True).get_future()
        chained = future.then(lambda done, seen=seen: seen.append(done.done()) or "chained")
        value = future.wait()
        report.equal(f"{kind}: then", (chained.wait(), seen), ("chained", [True]))
        job.check(report, kind)
        if kind in ("all_reduce", "broadcast"):
            report.bits(f"{kind}: the future's value", value[0], job.outputs[0].tensor)


def _hook_of_ddp(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """The gradients of DistributedDataParallel are the mean of the ranks'."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 5)).double()

    def gradients(model: nn.Module, member: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(values([member], (7, 20), torch.float64, factors=True)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = DistributedDataParallel(build(), process_group=group, bucket_cap_mb=0.1)
    for step in range(3):  # the buckets are rebuilt after the first
        found = gradients(model, me)
        wanted = [gradients(build(), member) for member in range(num)]
        for index, got in enumerate(found):
            mean = sum(grads[index] for grads in wanted) / num
            bound = 1e-13 * mean.abs().max().expand(mean.shape)
            report.close(f"step {step}, parameter {index}", got, mean, bound)
            report.same_on_all_ranks(f"step {step}, parameter {index}", got)


def _tensors_of_a_mesh(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    whole = _part(0, 0, (13, 9), torch.float64)
    rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    report.bits("full", rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    report.bits("rows to columns", columns.to_local(), whole.tensor_split(_cuts(9, num), 1)[me])
    product = columns @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(0)])  # a sum that is still to be made
    report.bits("partial sums", product.redistribute(mesh, [Replicate()]).to_local(), whole @ whole.T)


def _cuts(count: int, num: int) -> tuple[int, ...]:
    step = -(-count // num)  # all but the last ones have as many, rounded up
    return tuple(range(step, step * num, step))


@pytest.mark.parametrize(
    ("body", "at_least"),
    [
        (_coalesced, 2 * 3 * 2 * 12),
        (_functional, 2 * 3 * 12),
        (_functional_gradients, 2),
        (_objects, 2 * 7),
        (_futures, 2 * 4 * 3),
        (_hook_of_ddp, 2 * 18),
        (_tensors_of_a_mesh, 2 * 3),
    ],
)
@pytest.mark.parametrize(("num_ranks", "ranks"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (4, [1, 2, 3])])
def test_form(
    body: Callable[[dist.ProcessGroup, int, int, Report], None], at_least: int, num_ranks: int, ranks: list[int]
) -> None:
    assert_reports(testing.run_ranks(_in_group, num_ranks, body, ranks), at_least=at_least)
