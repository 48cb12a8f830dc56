"""What real programs do beside the plain call: tensors that overlap, callbacks that exchange, modes, groups that go early."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.collectives import gather_single, reduce_scatter_single
from tests.transport.values import Report, assert_reports, reduced, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from meshwright import testing

_DEADLINE_S = 20.0  # some of these hang where a backend has not thought of them


def _world(body: Callable[[dist.ProcessGroup, int, int, Report], None]) -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())], deadline_s=_DEADLINE_S) as (group,):
        body(group, group.rank(), group.size(), report)
    return report


def _part(member: int, index: int = 0, count: int = 1237, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return values([member, index], (count,), dtype)


def _in_place(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """The input is a part of the output, or the other way round, as sharded parameters have it."""
    for count in (1, 1237, 300_000):
        whole = torch.zeros(num * count, dtype=torch.int64)
        own = whole[me * count : (me + 1) * count]
        own.copy_(_part(me, 0, count))
        gather_single(whole, own, group=group)
        parts = [_part(member, 0, count) for member in range(num)]
        report.bits(f"all_gather into its own input, {count}", whole, torch.cat(parts))

        listed = [torch.zeros(count, dtype=torch.int64) for _ in range(num)]
        listed[me].copy_(_part(me, 0, count))
        dist.all_gather(listed, listed[me], group=group)
        for member in range(num):
            report.bits(f"all_gather of a list, {count}, {member}", listed[member], parts[member])

        whole = torch.cat([_part(me, index, count) for index in range(num)])
        own = whole[me * count : (me + 1) * count]
        reduce_scatter_single(own, whole, group=group)
        expected = reduced([_part(member, me, count) for member in range(num)], "sum")
        report.bits(f"reduce_scatter into its own input, {count}", own, expected)
        untouched = [_part(me, index, count) for index in range(num) if index != me]
        rest = [whole[index * count : (index + 1) * count] for index in range(num) if index != me]
        report.bits(f"the rest of that input, {count}", torch.cat(rest), torch.cat(untouched))


def _one_tensor_twice(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """A tensor is given to several operations under way at once; they run in the order of their issue."""
    data = _part(me)
    works = [dist.all_reduce(data, group=group, async_op=True) for _ in range(3)]
    works.append(dist.broadcast(data, group_src=num - 1, group=group, async_op=True))
    for work in works[::-1]:
        work.wait()
    total = reduced([_part(member) for member in range(num)], "sum")
    report.bits("three sums", data, total * num * num)


def _callback_exchanges(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """A callback on one exchange makes the next one and waits for it, as communication hooks do."""
    second = _part(me, 1)

    def make_second(future: torch.futures.Future) -> torch.Tensor:
        first = future.value()[0]
        second.add_(first)
        return dist.all_reduce(second, group=group, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(_part(me), group=group, async_op=True).get_future().then(make_second)
    first = reduced([_part(member) for member in range(num)], "sum")
    expected = reduced([_part(member, 1) + first for member in range(num)], "sum")
    report.bits("from the callback", future.wait(), expected)
    third = _part(me, 2)
    dist.all_reduce(third, group=group)
    report.bits("afterwards", third, reduced([_part(member, 2) for member in range(num)], "sum"))


def _waited_for_callback(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """The same, where the first exchange is waited for by whoever issued it."""
    second, done = _part(me, 1), torch.futures.Future()

    def make_second(_: torch.futures.Future) -> None:
        dist.all_reduce(second, group=group)
        done.set_result(None)

    work = dist.all_reduce(_part(me, 0, 400_000), group=group, async_op=True)
    work.get_future().add_done_callback(make_second)
    work.wait()
    done.wait()
    report.bits("from the callback", second, reduced([_part(member, 1) for member in range(num)], "sum"))


def _hooks_of_ddp(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """DistributedDataParallel with torch's own communication hooks: every rank takes the same step."""

    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 3))

    hooks = {
        "all_reduce": (group, default_hooks.allreduce_hook),
        "halves": (group, default_hooks.fp16_compress_hook),
    }
    for name, (state, hook) in hooks.items():
        model = DistributedDataParallel(build(), process_group=group, bucket_cap_mb=0.01)
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(values([me, step], (6, 24), torch.float32, factors=True)).square().mean().backward()
            optimizer.step()
        for index, parameter in enumerate(model.parameters()):
            report.same_on_all_ranks(f"{name}, parameter {index}", parameter)
            report.true(f"{name}, parameter {index}", bool(parameter.isfinite().all()), "not finite")


def _inference_mode(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Tensors made in inference mode may only be written there: by whichever thread does it."""
    with torch.inference_mode():
        for round_ in range(20):
            dense, base = _part(me, round_), _part(me, 100 + round_).repeat_interleave(2)
            strided = base[::2]
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (strided, dense)]
            room = torch.zeros(2 * 1237, dtype=torch.int64)[::2]
            receive = dist.irecv(room, group_src=(me - 1) % num, group=group)
            dist.isend(_part(me, round_), group_dst=(me + 1) % num, group=group).wait()
            for work in [*works, receive]:
                work.wait()
            for index, tensor in ((round_, dense), (100 + round_, strided)):
                total = reduced([_part(member, index) for member in range(num)], "sum")
                report.bits(f"round {round_}, {index}", tensor, total)
            report.bits(f"round {round_}, message", room, _part((me - 1) % num, round_))


def _leaves(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Parameters, which record what is done to them."""
    parameter = nn.Parameter(values([me], (30, 41), torch.float64))
    with torch.no_grad():
        dist.broadcast(parameter, group_src=1, group=group)
    report.bits("parameter", parameter, values([1], (30, 41), torch.float64))
    dist.all_reduce(parameter.data.T, group=group)
    whole = reduced([values([1], (30, 41), torch.float64)] * num, "sum")
    report.bits("its transposed data", parameter, whole)
    report.true("it still is a leaf", parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None)
    (parameter * 2).sum().backward()
    report.bits("gradient", parameter.grad, torch.full((30, 41), 2.0, dtype=torch.float64))


def _nobody_keeps(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Only the result of an operation is kept, not the tensors it was given."""
    count = 100_000
    works = []
    outputs = [torch.zeros(num * count, dtype=torch.int64) for _ in range(8)]
    for index, output in enumerate(outputs):
        works.append(gather_single(output, _part(me, index, count), group=group, async_op=True))
        torch.full((count,), -1)  # takes the place of what was freed too early
    gc.collect()
    for work in works:
        work.wait()
    for index, output in enumerate(outputs):
        expected = torch.cat([_part(member, index, count) for member in range(num)])
        report.bits(f"gathered {index}", output, expected)


BODIES = {
    "in place": (_in_place, 2 * 3 * 5),
    "one tensor twice": (_one_tensor_twice, 2),
    "callback exchanges": (_callback_exchanges, 4),
    "waited for callback": (_waited_for_callback, 2),
    "hooks of DDP": (_hooks_of_ddp, 2 * 2 * 6),
    "inference mode": (_inference_mode, 2 * 60),
    "leaves": (_leaves, 8),
    "nobody keeps": (_nobody_keeps, 16),
}
# gloo runs two operations of a group at once, and gets nothing with strides right (see `backends.gloo_takes`).
NOT_IN_GLOO = ("one tensor twice", "inference mode", "leaves")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in BODIES if not backends.IS_GLOO or name not in NOT_IN_GLOO])
def test_case(name: str, num_ranks: int) -> None:
    body, at_least = BODIES[name]
    assert_reports(testing.run_ranks(_world, num_ranks, body), at_least=at_least)


def _destroyed_early() -> list[str]:
    """Rank 1 never comes: what rank 0 has under way ends with an error when the group goes."""
    texts = []
    for round_ in range(5):
        group = backends.new_group(range(2))
        if group.rank() == 0:
            works = [dist.all_reduce(torch.ones(1000 * (round_ + 1)), group=group, async_op=True) for _ in range(4)]
            works.append(dist.irecv(torch.ones(3), group_src=1, group=group))
            dist.destroy_process_group(group)
            del group
            gc.collect()
            for work in works:
                try:
                    work.wait()
                    texts.append("no error")
                except RuntimeError as error:
                    texts.append(f"error: {error}")
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
    return texts


@pytest.mark.skipif(backends.IS_GLOO, reason="gloo waits for its timeout")
def test_a_group_that_goes_early_ends_what_is_under_way() -> None:
    texts = testing.run_ranks(_destroyed_early, 2)[0]
    assert len(texts) == 25
    assert all(text.startswith("error: ") and len(text) > 20 for text in texts), texts


def _premultiplied(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    data = values([me], (1237,), torch.float32)
    dist.all_reduce(data, op=dist._make_nccl_premul_sum(0.5), group=group)
    parts = [values([member], (1237,), torch.float32) * 0.5 for member in range(num)]
    report.bits("sum of halves", data, reduced(parts, "sum"))


@pytest.mark.skipif(backends.IS_GLOO, reason="gloo has no such sum")
def test_a_sum_with_a_factor() -> None:
    assert_reports(testing.run_ranks(_world, 3, _premultiplied), at_least=3)


def _errors_of_one_rank(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """What is refused before it starts leaves no trace in the group: all ranks refuse the same, and go on."""
    for bad in (
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND, group=group),
        lambda: gather_single(torch.ones(7), torch.ones(3), group=group),
        lambda: dist.all_to_all_single(torch.ones(7), torch.ones(7), group=group),
    ):
        try:
            bad()
            report.true("refused", False, "it was not refused")
        except (RuntimeError, ValueError) as error:
            report.true("refused", len(str(error)) > 10, error)
        data = _part(me)
        dist.all_reduce(data, group=group)
        report.bits("next", data, reduced([_part(member) for member in range(num)], "sum"))


def test_what_is_refused_at_once() -> None:
    assert_reports(testing.run_ranks(_world, 3, _errors_of_one_rank), at_least=18)


def _described(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    report.equal("name", dist.get_backend(group), backends.BACKEND)
    report.equal("size", (dist.get_world_size(group), dist.get_rank(group)), (num, me))
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    report.true("completed", work.is_completed())
    report.equal("result", [tensor.tolist() for tensor in work.result()], [[float(num)] * 3])
    for what in (copy.deepcopy, pickle.dumps):  # neither makes a second one, or crashes
        try:
            what(group)
            report.true(what.__name__, True)
        except (TypeError, RuntimeError, AttributeError) as error:
            report.true(what.__name__, str(error))


def test_what_a_group_says_of_itself() -> None:
    assert_reports(testing.run_ranks(_world, 2, _described), at_least=12)
