"""One collective operation: its tensors on a rank, how it is issued, and what has to come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.layouts import Placed, place, seen_through
from tests.transport.values import Report, draw, reduced, rounding, values
from torch import Tensor

REDUCE_OPS = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_uneven", "reduce_scatter_tensor")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# The parts for the other members lie in one tensor: where its rows share their memory, all parts are the same.
_JOINED = ("reduce_scatter_tensor", "all_to_all_single", "all_to_all_single_uneven")
# The names until torch 2.12.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What all ranks of a group agree on before they issue an operation."""

    kind: str
    shape: tuple[int, ...]
    """Of one part; where parts are uneven, the most that one can have."""
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0
    seed: int = 0
    input_layout: str = "plain"
    output_layout: str = "plain"

    def __str__(self) -> str:
        text = f"{self.kind} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        text += f" {self.op}" if self.kind in REDUCING else ""
        text += f" root {self.root}" if self.kind in ROOTED else ""
        return f"{text} {self.input_layout}->{self.output_layout} seed {self.seed}"

    @property
    def is_exact(self) -> bool:
        """Whether the result is known to the last bit."""
        if self.kind not in REDUCING or not (self.dtype.is_floating_point or self.dtype.is_complex):
            return True
        return self.op in ("min", "max") or (self.op == "sum" and backends.ADDS_IN_RANK_ORDER)

    def part(self, member: int, index: int = 0, rows: int | None = None) -> Tensor:
        """What a member brings; `index` where it brings a part for each other member."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        factors = self.kind in REDUCING and self.op == "product"
        if self.input_layout == "expanded" and self.kind in _JOINED:
            index = 0
        value = values((self.seed, member, index), shape, self.dtype, factors=factors)
        return seen_through(value, self.input_layout)

    def rows(self, *key: int) -> int:
        """The rows of an uneven part."""
        return draw((self.seed, *key), self.shape[0])


@dataclasses.dataclass
class Job:
    """One rank's side of a call: `start` it, wait, `check` it."""

    call: Call
    start: Callable[[dist.ProcessGroup, bool], Any]
    inputs: Sequence[Placed]
    outputs: Sequence[Placed]
    expected: Callable[[], list[Tensor]]
    bounds: Callable[[], list[Tensor]] | None = None
    _before: list[Tensor] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = [placed.tensor.clone() for placed in self.inputs]

    def check(self, report: Report, label: str) -> None:
        """Compare what came out with what plain torch computes; inputs and the memory around have to be as they were."""
        self._compare(report, label, [placed.tensor for placed in self.outputs], self.expected())
        for placed, before in zip(self.inputs, self._before, strict=True):
            report.bits(f"{label}: its input afterwards", placed.tensor, before)
        intact = all(placed.surroundings_are_intact() for placed in (*self.inputs, *self.outputs))
        report.true(label, intact, "memory beside the tensors was written")
        if self.call.kind == "all_reduce":
            report.same_on_all_ranks(label, self.outputs[0].tensor)

    def check_against(self, other: Job, report: Report, label: str) -> None:
        """Compare with the same call on another backend."""
        self._compare(
            report, label, [p.tensor for p in self.outputs], [p.tensor for p in other.outputs], exact_sums=False
        )

    def _compare(
        self, report: Report, label: str, got: list[Tensor], expected: list[Tensor], *, exact_sums: bool = True
    ) -> None:
        report.equal(f"{label}: number of results", len(got), len(expected))
        is_exact = self.call.is_exact and (exact_sums or self.call.op in ("min", "max") or self.bounds is None)
        if is_exact or self.bounds is None:
            for index, (mine, right) in enumerate(zip(got, expected, strict=True)):
                report.bits(f"{label} [{index}]", mine, right)
        else:
            for index, (mine, right, bound) in enumerate(zip(got, expected, self.bounds(), strict=True)):
                report.close(f"{label} [{index}]", mine, right, bound)


def _reduction(call: Call, num: int, index: int = 0, rows: int | None = None) -> dict[str, Any]:
    def parts() -> list[Tensor]:
        return [call.part(member, index, rows) for member in range(num)]

    inexact = call.dtype.is_floating_point or call.dtype.is_complex
    return {
        "expected": lambda: [reduced(parts(), call.op)],
        "bounds": (lambda: [rounding(parts(), call.op)]) if inexact else None,
    }


def _blank(call: Call, rows: int | None = None, shape: Sequence[int] | None = None) -> Placed:
    shape = shape or (call.shape if rows is None else (rows, *call.shape[1:]))
    return place(torch.full(tuple(shape), 3).to(call.dtype), call.output_layout)


def _all_reduce(call: Call, num: int, me: int) -> Job:
    data = place(call.part(me), call.output_layout)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.all_reduce(data.tensor, op=REDUCE_OPS[call.op], group=group, async_op=async_op)

    return Job(call, start, [], [data], **_reduction(call, num))


def _reduce(call: Call, num: int, me: int) -> Job:
    data = place(call.part(me), call.output_layout)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.reduce(data.tensor, group_dst=call.root, op=REDUCE_OPS[call.op], group=group, async_op=async_op)

    if me == call.root:
        return Job(call, start, [], [data], **_reduction(call, num))
    return Job(call, start, [], [], lambda: [])  # what is left in the others' tensors is nobody's business


def _broadcast(call: Call, num: int, me: int) -> Job:
    data = place(call.part(me), call.output_layout)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.broadcast(data.tensor, group_src=call.root, group=group, async_op=async_op)

    return Job(call, start, [], [data], lambda: [call.part(call.root)])


def _all_gather(call: Call, num: int, me: int, *, uneven: bool = False) -> Job:
    rows = [call.rows(member) if uneven else None for member in range(num)]
    mine = place(call.part(me, 0, rows[me]), call.input_layout)
    outputs = [_blank(call, rows[member]) for member in range(num)]

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.all_gather([placed.tensor for placed in outputs], mine.tensor, group=group, async_op=async_op)

    return Job(call, start, [mine], outputs, lambda: [call.part(m, 0, rows[m]) for m in range(num)])


def _all_gather_coalesced(call: Call, num: int, me: int) -> Job:
    """Two tensors of other sizes; the room for them is given rank by rank."""
    rows = [[call.rows(index, member) for index in range(2)] for member in range(num)]
    mine = [place(call.part(me, index, rows[me][index]), call.input_layout) for index in range(2)]
    outputs = [_blank(call, rows[member][index]) for member in range(num) for index in range(2)]

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        room = [placed.tensor for placed in outputs]
        lists = [room[2 * member : 2 * member + 2] for member in range(num)]
        work = group.allgather_coalesced(lists, [placed.tensor for placed in mine])
        return work if async_op else work.wait()

    return Job(call, start, mine, outputs, lambda: [call.part(m, i, rows[m][i]) for m in range(num) for i in range(2)])


def _all_gather_tensor(call: Call, num: int, me: int, *, stacked: bool = False) -> Job:
    mine = place(call.part(me), call.input_layout)
    join = torch.stack if stacked else torch.cat
    shape = (num, *call.shape) if stacked else (num * call.shape[0], *call.shape[1:])
    output = _blank(call, shape=shape)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return gather_single(output.tensor, mine.tensor, group=group, async_op=async_op)

    return Job(call, start, [mine], [output], lambda: [join([call.part(member) for member in range(num)])])


def _reduce_scatter(call: Call, num: int, me: int, *, uneven: bool = False) -> Job:
    rows = [call.rows(member) if uneven else None for member in range(num)]
    inputs = [place(call.part(me, index, rows[index]), call.input_layout) for index in range(num)]
    output = _blank(call, rows[me])

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        tensors = [placed.tensor for placed in inputs]
        return dist.reduce_scatter(output.tensor, tensors, op=REDUCE_OPS[call.op], group=group, async_op=async_op)

    return Job(call, start, inputs, [output], **_reduction(call, num, me, rows[me]))


def _reduce_scatter_tensor(call: Call, num: int, me: int) -> Job:
    mine = place(torch.cat([call.part(me, index) for index in range(num)]), call.input_layout)
    output = _blank(call)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        return reduce_scatter_single(output.tensor, mine.tensor, op=REDUCE_OPS[call.op], group=group, async_op=async_op)

    return Job(call, start, [mine], [output], **_reduction(call, num, me))


def _gather(call: Call, num: int, me: int) -> Job:
    mine = place(call.part(me), call.input_layout)
    outputs = [_blank(call) for _ in range(num)] if me == call.root else []

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        tensors = [placed.tensor for placed in outputs] or None
        return dist.gather(mine.tensor, tensors, group_dst=call.root, group=group, async_op=async_op)

    return Job(call, start, [mine], outputs, lambda: [call.part(m) for m in range(num)] if outputs else [])


def _scatter(call: Call, num: int, me: int) -> Job:
    inputs = [place(call.part(me, index), call.input_layout) for index in range(num)] if me == call.root else []
    output = _blank(call)

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        tensors = [placed.tensor for placed in inputs] or None
        return dist.scatter(output.tensor, tensors, group_src=call.root, group=group, async_op=async_op)

    return Job(call, start, inputs, [output], lambda: [call.part(call.root, me)])


def _all_to_all(call: Call, num: int, me: int, *, uneven: bool = False) -> Job:
    def rows(source: int, target: int) -> int | None:
        return call.rows(source, target) if uneven else None

    inputs = [place(call.part(me, index, rows(me, index)), call.input_layout) for index in range(num)]
    outputs = [_blank(call, rows(source, me)) for source in range(num)]

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        received = [placed.tensor for placed in outputs]
        return dist.all_to_all(received, [placed.tensor for placed in inputs], group=group, async_op=async_op)

    return Job(call, start, inputs, outputs, lambda: [call.part(m, me, rows(m, me)) for m in range(num)])


def _all_to_all_single(call: Call, num: int, me: int, *, uneven: bool = False) -> Job:
    def rows(source: int, target: int) -> int:
        return call.rows(source, target) if uneven else call.shape[0]

    sent, received = [rows(me, other) for other in range(num)], [rows(other, me) for other in range(num)]
    mine = place(torch.cat([call.part(me, other, sent[other]) for other in range(num)]), call.input_layout)
    output = _blank(call, sum(received))

    def start(group: dist.ProcessGroup, async_op: bool) -> Any:
        splits = (received, sent) if uneven else (None, None)
        return dist.all_to_all_single(output.tensor, mine.tensor, *splits, group=group, async_op=async_op)

    return Job(call, start, [mine], [output], lambda: [torch.cat([call.part(m, me, received[m]) for m in range(num)])])


KINDS: dict[str, Callable[..., Job]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_uneven": lambda *a: _all_gather(*a, uneven=True),
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_tensor": _all_gather_tensor,
    "all_gather_stacked": lambda *a: _all_gather_tensor(*a, stacked=True),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_uneven": lambda *a: _reduce_scatter(*a, uneven=True),
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": lambda *a: _all_to_all(*a, uneven=True),
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": lambda *a: _all_to_all_single(*a, uneven=True),
}


def prepare(call: Call, num_ranks: int, group_rank: int) -> Job:
    """Make one rank's tensors for a call."""
    return KINDS[call.kind](call, num_ranks, group_rank)


def run(call: Call, group: dist.ProcessGroup, *, async_op: bool = False) -> Job:
    """Do a call on a group, and return it done."""
    job = prepare(call, group.size(), group.rank())
    work = job.start(group, async_op)
    if async_op:
        work.wait()
    return job


def run_all(calls: Sequence[Call], ranks_of_groups: Sequence[Sequence[int]]) -> Report:
    """Do all calls on all groups, every second one asynchronously; compare all with plain torch, every third with gloo."""
    report = Report()
    with backends.groups_of(ranks_of_groups) as groups, backends.groups_of(ranks_of_groups, "gloo") as twins:
        for ranks, group, twin in zip(ranks_of_groups, groups, twins, strict=True):
            for number, call in enumerate(calls):
                if group is None or twin is None:
                    break
                call = dataclasses.replace(call, root=call.root % len(ranks))
                if backends.IS_GLOO and not backends.gloo_takes(call):
                    report.skipped += 1
                    continue
                label = f"{call} on ranks {list(ranks)}"
                job = run(call, group, async_op=number % 2 == 1)
                job.check(report, label)
                same = call if call.input_layout == "expanded" else dataclasses.replace(call, input_layout="plain")
                same = dataclasses.replace(same, output_layout="plain")
                if number % 3 == 0 and not backends.IS_GLOO and backends.gloo_takes(same):
                    job.check_against(run(same, twin), report, f"{label} against gloo")
    return report
