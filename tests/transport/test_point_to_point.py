"""Sends and receives: every dtype, size and layout, tags in any order, any source, and much under way at once."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.layouts import LAYOUTS, place
from tests.transport.values import DTYPES, Report, assert_reports, values

from meshwright import testing

SHAPES = ((0,), (1,), (1237,), (75, 1023), (7, 3), ())
LARGE = (2**20,)  # 8 MiB of float64: more than any buffer between two ranks


def _message(*key: int, shape: tuple[int, ...] = (257,), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return values(key, shape, dtype)


def _room(shape: tuple[int, ...] = (257,), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full(shape, 3).to(dtype)


def _world(body: Callable[[dist.ProcessGroup, int, int, Report], None]) -> Report:
    """Call `body(group, rank, size, report)` with a group of all ranks."""
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        assert group is not None
        body(group, group.rank(), group.size(), report)
    return report


def _every_dtype(ranks: list[int]) -> Report:
    """Around the ring of a group, once blocking and once not: rank r sends to r + 1."""
    report = Report()
    with backends.groups_of([ranks]) as (group,):
        if group is None:
            return report
        me, num = group.rank(), group.size()
        target, source = (me + 1) % num, (me - 1) % num
        cases = itertools.product(DTYPES, SHAPES, LAYOUTS)
        for number, (dtype, shape, layout) in enumerate(cases):
            # gloo wants what it sends to be contiguous, and receives wrong values into what is not.
            if backends.IS_GLOO and layout not in ("plain", "offset"):
                report.skipped += 1
                continue
            sent = place(_message(number, me, shape=shape, dtype=dtype), layout)
            received = place(_room(shape, dtype), layout)
            tag = number % 5
            if number % 2:
                works = [
                    dist.isend(sent.tensor, group_dst=target, group=group, tag=tag),
                    dist.irecv(received.tensor, group_src=source, group=group, tag=tag),
                ]
                for work in works:
                    work.wait()
            elif me == 0:
                dist.send(sent.tensor, group_dst=target, group=group, tag=tag)
                dist.recv(received.tensor, group_src=source, group=group, tag=tag)
            else:
                dist.recv(received.tensor, group_src=source, group=group, tag=tag)
                dist.send(sent.tensor, group_dst=target, group=group, tag=tag)
            label = f"{dtype}{list(shape)} {layout} in {ranks}"
            report.bits(label, received.tensor, _message(number, source, shape=shape, dtype=dtype))
            report.true(label, received.surroundings_are_intact(), "memory beside the tensor was written")
    return report


@pytest.mark.parametrize(
    ("num_ranks", "ranks"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (4, [1, 3]), (8, [2, 3, 5])]
)
def test_every_dtype_size_and_layout(num_ranks: int, ranks: list[int]) -> None:
    reports = testing.run_ranks(_every_dtype, num_ranks, ranks)
    assert_reports(reports, at_least=len(ranks) * len(DTYPES) * len(SHAPES))


def _tags_backwards(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    tags = [1, 2, 3, 7, 2**20]
    for pattern, receive_order in enumerate(([4, 3, 2, 1, 0], [1, 0, 4, 2, 3])):
        if me == 0:
            works = [dist.isend(_message(pattern, tag, shape=LARGE), group_dst=1, group=group, tag=tag) for tag in tags]
            for work in works:
                work.wait()
        elif me == 1:
            for index in receive_order:
                room = _room(LARGE)
                dist.recv(room, group_src=0, group=group, tag=tags[index])
                report.bits(f"tag {tags[index]}", room, _message(pattern, tags[index], shape=LARGE))


def test_large_messages_are_received_in_any_order_of_their_tags() -> None:
    assert_reports(testing.run_ranks(_world, 2, _tags_backwards), at_least=10)


def _both_send_first(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    for round_ in range(3):
        peers = [rank for rank in range(num) if rank != me]
        sends = [dist.isend(_message(round_, me, peer, shape=LARGE), group_dst=peer, group=group) for peer in peers]
        rooms = {peer: _room(LARGE) for peer in peers}
        receives = [dist.irecv(rooms[peer], group_src=peer, group=group) for peer in reversed(peers)]
        for work in reversed(sends + receives):
            work.wait()
        for peer in peers:
            report.bits(f"round {round_} from {peer}", rooms[peer], _message(round_, peer, me, shape=LARGE))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_sides_may_send_first(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_world, num_ranks, _both_send_first), at_least=6)


def _any_source(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    shapes = [(1,), (257,), (300_000,)]
    if not backends.IS_GLOO:  # gloo refuses this one
        shapes.append((0,))
    for round_, shape in enumerate(shapes):
        if me == 0:
            sources = []
            for number in range(num - 1):
                room = _room(shape)
                if number % 2:
                    work = dist.irecv(room, group=group, tag=round_)
                    work.wait()
                    source = work._source_rank()
                else:
                    source = dist.recv(room, group=group, tag=round_)
                report.bits(f"round {round_} from {source}", room, _message(round_, source, shape=shape))
                sources.append(source)
            report.equal(f"round {round_}", sorted(sources), list(range(1, num)))
        else:
            dist.send(_message(round_, me, shape=shape), group_dst=0, group=group, tag=round_)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_source(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_world, num_ranks, _any_source), at_least=3)


def _any_source_of_a_tag(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Both others send tag 1 and then tag 2; whoever asks for tag 2 must not be given a tag 1."""
    if me == 0:
        for tag in (2, 1):
            for _ in range(num - 1):
                room = _room()
                source = dist.recv(room, group=group, tag=tag)
                report.bits(f"tag {tag} from {source}", room, _message(tag, source))
    else:
        works = [dist.isend(_message(tag, me), group_dst=0, group=group, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()


def test_any_source_heeds_the_tag() -> None:
    assert_reports(testing.run_ranks(_world, 3, _any_source_of_a_tag), at_least=4)


def _ranks_of_the_world(group: dist.ProcessGroup | None, report: Report) -> None:
    # By their numbers in the world, where the other tests count within the group.
    if group is None:
        return
    if dist.get_rank() == 1:
        dist.send(_message(5), dst=3, group=group)
        room = _room()
        report.equal("source", dist.recv(room, group=group), 3)
        report.bits("answer", room, _message(6))
    else:
        room = _room()
        report.equal("source", dist.recv(room, src=1, group=group), 1)
        report.bits("question", room, _message(5))
        dist.send(_message(6), dst=1, group=group)


def _sub_group_by_world_ranks() -> Report:
    report = Report()
    with backends.groups_of([[1, 3]]) as (group,):
        _ranks_of_the_world(group, report)
    return report


def test_ranks_of_the_world_in_a_sub_group() -> None:
    assert_reports(testing.run_ranks(_sub_group_by_world_ranks, 4), at_least=4)


def _batches(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    for round_, shape in enumerate([(0,), (3,), (1237,), (200_000,)]):
        peers = [(me + shift) % num for shift in range(1, num)]
        rooms = {(peer, k): _room(shape) for peer in peers for k in range(3)}
        receives = [dist.P2POp(dist.irecv, room, group=group, group_peer=peer) for (peer, _), room in rooms.items()]
        sends = [
            dist.P2POp(dist.isend, _message(round_, me, peer, k, shape=shape), group=group, group_peer=peer)
            for peer in reversed(peers)
            for k in range(3)
        ]
        for work in dist.batch_isend_irecv(sends + receives if me % 2 else receives + sends):
            work.wait()
        for (peer, k), room in rooms.items():
            report.bits(f"round {round_} from {peer}, {k}", room, _message(round_, peer, me, k, shape=shape))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_batches(num_ranks: int) -> None:
    reports = testing.run_ranks(_world, num_ranks, _batches)
    assert_reports(reports, at_least=4 * 3 * num_ranks * (num_ranks - 1))


def _first_in_first_out(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """1000 messages of all sizes under one tag, sent before the first is asked for."""
    sizes = [(number * 7919) % 1500 for number in range(1000)]
    if me == 0:
        works = [
            dist.isend(_message(number, shape=(size,)), group_dst=1, group=group) for number, size in enumerate(sizes)
        ]
        for work in works:
            work.wait()
    else:
        wrong = []
        for number, size in enumerate(sizes):
            room = _room((size,))
            dist.recv(room, group_src=0, group=group)
            if not torch.equal(room, _message(number, shape=(size,))):
                wrong.append(number)
        report.equal("messages that were not what was sent", wrong, [])


def test_messages_of_one_tag_come_in_the_order_they_were_sent() -> None:
    assert_reports(testing.run_ranks(_world, 2, _first_in_first_out), at_least=1)


def _much_unasked(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Far more is sent than fits between two ranks, and then asked for from the last one back."""
    shape, count = (32 * 1024,), 64
    if me == 0:
        # Nobody here keeps the tensors: the operations have to.
        works = [dist.isend(_message(tag, shape=shape), group_dst=1, group=group, tag=tag) for tag in range(count)]
        for work in works:
            work.wait()
    else:
        for tag in reversed(range(count)):
            room = _room(shape)
            dist.recv(room, group_src=0, group=group, tag=tag)
            report.bits(f"tag {tag}", room, _message(tag, shape=shape))


def test_16_mebibytes_unasked_for() -> None:
    assert_reports(testing.run_ranks(_world, 2, _much_unasked), at_least=64)


def _reused(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Once a send is waited for, its tensor is the sender's again."""
    for round_, shape in enumerate([(5,), (1000,), (400_000,)] * 3):
        if me == 0:
            tensor = _message(round_, shape=shape)
            dist.isend(tensor, group_dst=1, group=group).wait()
            tensor.zero_()
            dist.send(tensor, group_dst=1, group=group)
            tensor.fill_(1)
        else:
            first, second = _room(shape), _room(shape)
            dist.recv(first, group_src=0, group=group)
            dist.recv(second, group_src=0, group=group)
            report.bits(f"round {round_}, first", first, _message(round_, shape=shape))
            report.bits(f"round {round_}, second", second, torch.zeros_like(second))


def test_a_sent_tensor_may_be_written_again() -> None:
    assert_reports(testing.run_ranks(_world, 2, _reused), at_least=18)


def _between_collectives(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Receives are open while collectives of the same group go by, and sends come in between."""
    source, target = (me - 1) % num, (me + 1) % num
    rooms = [_room((1000 * (k + 1),)) for k in range(6)]
    receives = [dist.irecv(room, group_src=source, group=group, tag=k) for k, room in enumerate(rooms)]
    sends = []
    for k in (3, 0, 5, 1, 4, 2):
        total = torch.full((20_000,), me + 1.0)
        pending = dist.all_reduce(total, group=group, async_op=True)
        sends.append(dist.isend(_message(me, k, shape=(1000 * (k + 1),)), group_dst=target, group=group, tag=k))
        dist.barrier(group=group)
        pending.wait()
        report.bits(f"sum {k}", total, torch.full((20_000,), num * (num + 1) / 2.0))
    for work in [*receives, *sends]:
        work.wait()
    for k, room in enumerate(rooms):
        report.bits(f"tag {k}", room, _message(source, k, shape=(1000 * (k + 1),)))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_between_collectives(num_ranks: int) -> None:
    assert_reports(testing.run_ranks(_world, num_ranks, _between_collectives), at_least=12 * num_ranks)


def _strided_rooms(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    """Another thread may find that a message has come just when its receiver begins to wait: values and source are there."""
    source, target = (me - 1) % num, (me + 1) % num
    pause = random.Random(me)
    early_values = early_sources = 0
    for round_ in range(2500):
        room = torch.zeros(200, dtype=torch.int64)[::2]
        receive = dist.irecv(room, group_src=source, group=group)
        _compute(pause.random() * 2e-4)
        send = dist.isend(torch.full((100,), round_ + 1), group_dst=target, group=group)
        _compute(pause.random() * 2e-4)
        receive.wait()
        early_values += int((room != round_ + 1).any())
        early_sources += int(receive._source_rank() != source)
        send.wait()
    report.equal("waits that were over before the values had come", early_values, 0)
    report.equal("waits that were over before the source was known", early_sources, 0)


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(backends.IS_GLOO, reason="gloo receives into tensors as if they had no strides")
def test_a_wait_is_over_when_the_values_are_there() -> None:
    assert_reports(testing.run_ranks(_world, 3, _strided_rooms), at_least=6)


def _objects(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    sent = [{"a": 1}, "text", list(range(10_000)), torch.arange(5)]
    if me == 0:
        dist.send_object_list(sent, group_dst=1, group=group)
    else:
        received: list[object] = [None] * 4
        report.equal("source", dist.recv_object_list(received, group_src=0, group=group), 0)
        report.equal("objects", received[:3], sent[:3])
        report.bits("tensor", received[3], sent[3])


def test_objects() -> None:
    assert_reports(testing.run_ranks(_world, 2, _objects), at_least=3)


def _is_completed(group: dist.ProcessGroup, me: int, num: int, report: Report) -> None:
    room = _room()
    if me == 0:
        work = dist.irecv(room, group_src=1, group=group)
        report.true("nothing was sent yet", not work.is_completed())
        dist.barrier(group=group)
        work.wait()
        report.bits("message", room, _message(9))
        if not backends.IS_GLOO:  # gloo waits for another message
            work.wait()
            report.true("done after waiting", work.is_completed())
    else:
        dist.barrier(group=group)
        dist.send(_message(9), group_dst=0, group=group)


def test_a_receive_is_done_when_its_message_is_there() -> None:
    assert_reports(testing.run_ranks(_world, 2, _is_completed), at_least=2)


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
