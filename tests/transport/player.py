"""One rank's way through a random program: every result is compared with what plain torch computes."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import mmap
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.collectives import Call, gather_single, prepare
from tests.transport.layouts import place
from tests.transport.programs import Program, Step, make_program
from tests.transport.values import Report, draw, values

MOST_OPEN = 12  # operations under way at once on one rank


class WrongValueError(AssertionError):
    """A result differs; the text has seed and step."""


@dataclasses.dataclass(frozen=True)
class Sabotage:
    """What one rank is to do wrong at one step, to prove that it is noticed: "corrupt" or "hang"."""

    kind: str
    rank: int
    step: int


@dataclasses.dataclass
class Played:
    """What one rank did."""

    operations: int = 0
    checks: int = 0
    tensor_bytes: int = 0


@dataclasses.dataclass
class _Open:
    step: int
    ready_at: int
    wait: Callable[[], Any]
    check: Callable[[Report, str], None]


def takes(call: Call) -> bool:
    """Whether the backend under test can do a call at all."""
    if not backends.IS_GLOO:
        return True
    if call.kind in ("message", "any_source"):
        # gloo sends nothing from any source that is empty, and knows no strides.
        dense = {call.input_layout, call.output_layout} <= {"plain", "offset"}
        return dense and (call.kind == "message" or 0 not in call.shape)
    return backends.gloo_takes(call)


class Progress:
    """The step that each rank is at, in a file: readable whatever has become of the rank."""

    def __init__(self, path: str | None, num_ranks: int) -> None:
        self._map = None
        if path is not None:
            with Path(path).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 8 * num_ranks)

    @staticmethod
    def create(path: str, num_ranks: int) -> None:
        """Make the file."""
        Path(path).write_bytes(struct.pack("<q", -1) * num_ranks)

    @staticmethod
    def read(path: str) -> list[int]:
        """Return the step of each rank; -1 before the first."""
        return [entry[0] for entry in struct.iter_unpack("<q", Path(path).read_bytes())]

    def note(self, rank: int, step: int) -> None:
        """Note a rank's step."""
        if self._map is not None:
            struct.pack_into("<q", self._map, 8 * rank, step)


class _Player:
    def __init__(
        self, program: Program, groups: list[dist.ProcessGroup | None], progress: Progress, sabotage: Sabotage | None
    ) -> None:
        self.program = program
        self.groups = groups
        self.progress = progress
        self.sabotage = sabotage
        self.rank = dist.get_rank()
        # What this rank alone decides: when it waits, and how long it computes in between.
        self.random = random.Random(f"rank {self.rank} in {program.seed}")
        self.open: list[_Open] = []
        self.played = Played()

    def play(self) -> Played:
        for index, step in enumerate(self.program.steps):
            self.progress.note(self.rank, index)
            group = self.groups[step.group]
            if group is not None and self._takes_part(step, group):
                self._compute()
                self._sabotaged(index, "hang")
                self.played.operations += 1
                with self._named(index):
                    entry = getattr(self, f"_{step.kind}")(index, step, group)
                if step.is_async:
                    self.open.append(entry)
                else:
                    self._finish(entry)
            self._wait_for_some(index)
        while self.open:
            self._finish(self.open.pop(self.random.randrange(len(self.open))))
        return self.played

    def _takes_part(self, step: Step, group: dist.ProcessGroup) -> bool:
        if step.message is None:
            return True
        return group.rank() == (step.message.source if step.kind == "send" else step.message.target)

    def _compute(self) -> None:
        if self.random.random() < 0.3:
            size = self.random.randint(8, 160)
            square = torch.ones(size, size)
            (square @ square).sum().item()

    def _sabotaged(self, step: int, kind: str) -> bool:
        wanted = self.sabotage
        if wanted is None or (wanted.kind, wanted.rank) != (kind, self.rank) or step < wanted.step:
            return False
        if kind == "hang":
            threading.Event().wait()
        return True

    def _wait_for_some(self, index: int) -> None:
        while True:
            ready = [entry for entry in self.open if entry.ready_at <= index]
            if not ready or (len(self.open) <= MOST_OPEN and self.random.random() < 0.7):
                return
            entry = self.random.choice(ready)
            self.open.remove(entry)
            self._finish(entry)

    @contextlib.contextmanager
    def _named(self, index: int) -> Iterator[str]:
        """Give errors the seed and the step."""
        step = self.program.steps[index]
        ranks = list(self.program.groups[step.group])
        where = f"seed {self.program.seed}, step {index} of {len(self.program.steps)}: {step.kind} in group {ranks}"
        try:
            yield where
        except RuntimeError as error:
            raise RuntimeError(f"{where}: {error}") from error

    def _finish(self, entry: _Open) -> None:
        self.progress.note(self.rank, entry.step)
        report = Report()
        with self._named(entry.step) as where:
            entry.wait()
            entry.check(report, where)
        self.played.checks += report.checks
        if report.failures:
            raise WrongValueError("\n".join(report.failures[:4]))

    # One method for each kind of step; each returns how to wait for it and how to check it.

    def _collective(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        job = prepare(step.calls[0], group.size(), group.rank())
        self._count(*job.inputs, *job.outputs)
        work = job.start(group, step.is_async)

        def wait() -> None:
            if step.is_async:
                # Both ways of waiting.
                work.get_future().wait() if index % 5 == 0 and not backends.IS_GLOO else work.wait()
            if self._sabotaged(index, "corrupt") and job.outputs and job.outputs[0].tensor.numel():
                job.outputs[0].tensor.view(-1)[-1:].copy_(job.outputs[0].tensor.view(-1)[-1:] == 0)

        return _Open(index, index, wait, lambda report, label: job.check(report, f"{label}, {job.call}"))

    def _coalesced(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        jobs = [prepare(call, group.size(), group.rank()) for call in step.calls]
        with dist._coalescing_manager(group, async_ops=step.is_async) as manager:
            for job in jobs:
                self._count(*job.inputs, *job.outputs)
                job.start(group, False)

        def check(report: Report, label: str) -> None:
            for job in jobs:
                job.check(report, f"{label}, {job.call}")

        return _Open(index, index, manager.wait if step.is_async else _nothing, check)

    def _send(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        message = step.message
        data = place(message.call.part(message.source, message.number), message.call.input_layout)
        self._count(data)
        if not step.is_async:
            dist.send(data.tensor, group_dst=message.target, group=group, tag=message.tag)
            data.tensor.zero_()  # it is the sender's again
            return _Open(index, index, _nothing, _unchecked)
        work = dist.isend(data.tensor, group_dst=message.target, group=group, tag=message.tag)
        return _Open(index, step.ready_at, work.wait, _unchecked)

    def _receive(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        message = step.message
        right = message.call.part(message.source, message.number)
        room = place(torch.full_like(right, 1), message.call.output_layout)
        self._count(room)
        if step.is_async:
            wait = dist.irecv(room.tensor, group_src=message.source, group=group, tag=message.tag).wait
        else:
            dist.recv(room.tensor, group_src=message.source, group=group, tag=message.tag)
            wait = _nothing

        def check(report: Report, label: str) -> None:
            label = f"{label}, tag {message.tag} from {message.source} to {message.target}, {message.call}"
            report.bits(label, room.tensor, right)
            report.true(label, room.surroundings_are_intact(), "memory beside the tensor was written")

        return _Open(index, step.ready_at, wait, check)

    def _any_source(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        call, me = step.calls[0], group.rank()
        if me != step.root:
            data = place(call.part(me), call.input_layout)
            dist.send(data.tensor, group_dst=step.root, group=group, tag=step.tag)
            return _Open(index, index, _nothing, _unchecked)
        rooms = {}
        for _ in range(group.size() - 1):
            room = place(torch.full_like(call.part(me), 1), call.output_layout)
            self._count(room)
            rooms[dist.recv(room.tensor, group=group, tag=step.tag)] = room

        def check(report: Report, label: str) -> None:
            ranks = self.program.groups[step.group]
            report.equal(f"{label}: sources", sorted(rooms), [rank for rank in ranks if rank != self.rank])
            for source, room in rooms.items():
                report.bits(f"{label}, from {source}, {call}", room.tensor, call.part(ranks.index(source)))

        return _Open(index, index, _nothing, check)

    def _batch(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        me, num = group.rank(), group.size()
        target, source = (me + step.root) % num, (me - step.root) % num
        sent = [place(call.part(me), call.input_layout) for call in step.calls]
        rooms = [place(torch.full_like(call.part(source), 1), call.output_layout) for call in step.calls]
        self._count(*rooms)
        sends = [dist.P2POp(dist.isend, p.tensor, group=group, tag=step.tag, group_peer=target) for p in sent]
        receives = [dist.P2POp(dist.irecv, p.tensor, group=group, tag=step.tag, group_peer=source) for p in rooms]
        works = dist.batch_isend_irecv(sends + receives if self.random.random() < 0.5 else receives + sends)

        def check(report: Report, label: str) -> None:
            for call, room in zip(step.calls, rooms, strict=True):
                report.bits(f"{label}, from {source}, {call}", room.tensor, call.part(source))

        return _Open(index, index, lambda: [work.wait() for work in works], check)

    def _barrier(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        work = dist.barrier(group=group, async_op=step.is_async)
        return _Open(index, index, work.wait if step.is_async else _nothing, _unchecked)

    def _objects(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        num = group.size()
        gathered: list[Any] = [None] * num
        dist.all_gather_object(gathered, (self.rank, "x" * (step.tag % 5000)), group=group)
        told = [(step.tag, "y")] if group.rank() == step.root else [None]
        dist.broadcast_object_list(told, group=group, group_src=step.root)

        def check(report: Report, label: str) -> None:
            ranks = self.program.groups[step.group]
            report.equal(f"{label}, gathered", gathered, [(rank, "x" * (step.tag % 5000)) for rank in ranks])
            report.equal(f"{label}, told", told, [(step.tag, "y")])

        return _Open(index, index, _nothing, check)

    def _sparse(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        dtype = (torch.int64, torch.float64, torch.float32)[step.tag % 3]
        mine = _sparse_part(step.tag, group.rank(), dtype)
        work = dist.all_reduce(mine, group=group, async_op=step.is_async)

        def check(report: Report, label: str) -> None:
            right = sum(_sparse_part(step.tag, member, dtype).to_dense() for member in range(group.size()))
            report.bits(f"{label}, {dtype}", mine.to_dense(), right)

        return _Open(index, index, work.wait if step.is_async else _nothing, check)

    def _refused(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        num, data = group.size(), torch.ones(4)
        calls = (
            lambda: group.recv([data], num + step.tag % 3, 0).wait(),
            lambda: group.send([data], num, 0).wait(),
            lambda: gather_single(torch.ones(4 * num, dtype=torch.int32), data, group=group),
            lambda: dist.all_to_all_single(data, data, [5, -1] + [0] * (num - 2), [4] + [0] * (num - 1), group=group),
        )
        text = ""
        try:
            calls[step.tag % (4 if num > 1 else 3)]()
        except RuntimeError as error:
            text = str(error)
        return _Open(index, index, _nothing, lambda report, label: report.true(label, "rule: " in text, text))

    def _monitored(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        dist.monitored_barrier(group)
        return _Open(index, index, _nothing, _unchecked)

    def _split(self, index: int, step: Step, group: dist.ProcessGroup) -> _Open:
        me, num = group.rank(), group.size()
        ranks = list(range(step.tag % num, num))
        part = group.split_group(ranks)
        total = torch.tensor([me])
        if part is not None:
            part.allreduce([total]).wait()
            part.shutdown()
        right = sum(ranks) if me in ranks else me
        return _Open(index, index, _nothing, lambda report, label: report.equal(label, total.item(), right))

    def _count(self, *placed: Any) -> None:
        self.played.tensor_bytes += sum(entry.tensor.nbytes for entry in placed)


def _sparse_part(seed: int, member: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of small whole numbers, whose sums are exact; with entries twice, and on some ranks with none."""
    count = 0 if (seed + member) % 5 == 0 else draw((seed, member), 400)
    where = torch.stack(
        [values((seed, member, dim), (count,), torch.int64).remainder(size) for dim, size in ((0, 40), (1, 9))]
    )
    entries = values((seed, member, 2), (count, 2), torch.int64).remainder(100).to(dtype)
    return torch.sparse_coo_tensor(where, entries, (40, 9, 2), check_invariants=True)


def _nothing() -> None:
    """What is done already is not waited for."""


def _unchecked(report: Report, label: str) -> None:
    """Nothing came out on this side."""


def play(
    seed: int,
    num_steps: int | None = None,
    timeout_s: float = backends.TIMEOUT_S,
    progress_path: str | None = None,
    sabotage: Sabotage | None = None,
) -> Played:
    """Make the program of a seed and go through it, in new groups; every rank of the world calls this.

    Raises:
        WrongValueError: A result differs from what plain torch computes.
        RuntimeError: An operation failed; the text has seed and step.
    """
    torch.set_num_threads(1)
    num_ranks = dist.get_world_size()
    program = make_program(seed, num_ranks, num_steps, takes)
    progress = Progress(progress_path, num_ranks)
    # In C, so that it comes whatever the interpreter's lock is doing.
    faulthandler.dump_traceback_later(timeout_s, exit=False)
    groups = [backends.new_group(ranks, timeout_s=timeout_s) for ranks in program.groups]
    played = _Player(program, groups, progress, sabotage).play()
    dist.barrier()
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
    faulthandler.cancel_dump_traceback_later()
    return played
