"""Every collective against plain torch and against gloo: kinds, dtypes, sizes, layouts, roots, sub-groups.

In worlds of 2 and 3 ranks (4 too with MESHWRIGHT_FULL_GRID=1) kinds, dtypes and sizes are crossed in full; in sub-groups and on
8 ranks every kind meets every dtype, and sizes, layouts, operations and roots take turns so that each pair of them meets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from tests.scopes import FULL_GRID
from tests.transport import backends
from tests.transport.collectives import KINDS, REDUCING, ROOTED, Call, run, run_all
from tests.transport.layouts import LAYOUTS
from tests.transport.values import DTYPES, FLOATS, HALVES, Report, assert_reports, ops_of, reduced

from meshwright import testing

# Empty, one entry, an odd number, and about 300 KB of float32 in rows that no power of two divides.
SHAPES = ((0,), (1,), (1237,), (75, 1023))
SMALL_SHAPES = ((), (0, 5), (7, 3), (3, 5, 4), (129,))
MOVING = tuple(kind for kind in KINDS if kind not in REDUCING)


def _fits(kind: str, shape: tuple[int, ...]) -> bool:
    # A scalar has no rows to cut or to join.
    return bool(shape) or kind in (
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "all_gather_stacked",
        "gather",
        "scatter",
    )


def _full_grid(kinds: Sequence[str]) -> list[Call]:
    calls = []
    for kind in kinds:
        for dtype in DTYPES:
            for shape in SHAPES:
                op = ops_of(dtype)[len(calls) % len(ops_of(dtype))]
                calls.append(Call(kind=kind, shape=shape, dtype=dtype, op=op, root=len(calls), seed=len(calls)))
    return calls


def _taking_turns(kinds: Sequence[str], shapes: Sequence[tuple[int, ...]], rounds: int = 1) -> list[Call]:
    calls = []
    for i, kind in enumerate(kinds):
        for j, dtype in enumerate(DTYPES * rounds):
            layout = LAYOUTS[(i + j // len(shapes)) % len(LAYOUTS)]
            shape, op = shapes[(i + j) % len(shapes)], ops_of(dtype)[(i + j) % len(ops_of(dtype))]
            calls.append(
                Call(
                    kind=kind,
                    shape=shape if _fits(kind, shape) else (5, 9),
                    dtype=dtype,
                    op=op,
                    root=i + j,
                    seed=1000 * i + j,
                    input_layout=layout,
                    output_layout=LAYOUTS[(i + j // len(shapes) + j) % len(LAYOUTS)],
                )
            )
    return calls


@pytest.mark.parametrize("num_ranks", [2, 3, 4] if FULL_GRID else [2, 3])
@pytest.mark.parametrize("kinds", [REDUCING, MOVING], ids=["reducing", "moving"])
def test_every_collective_dtype_and_size(num_ranks: int, kinds: Sequence[str]) -> None:
    reports = testing.run_ranks(run_all, num_ranks, _full_grid(kinds), [range(num_ranks)])
    assert_reports(reports, at_least=2 * len(kinds) * len(DTYPES))


@pytest.mark.parametrize("num_ranks", [3, 4, 8] if FULL_GRID else [3, 4])
def test_sub_groups(num_ranks: int) -> None:
    calls = _taking_turns(list(KINDS), SHAPES)
    reports = testing.run_ranks(run_all, num_ranks, calls, backends.subsets(num_ranks))
    assert_reports(reports, at_least=2 * len(calls))


def test_eight_ranks() -> None:
    calls = _taking_turns(list(KINDS), SHAPES)
    assert_reports(testing.run_ranks(run_all, 8, calls, [range(8)]), at_least=8 * len(calls))


@pytest.mark.parametrize("num_ranks", [2, 3, 4] if FULL_GRID else [2, 4])
def test_every_reduction_of_every_dtype(num_ranks: int) -> None:
    calls = [
        Call(kind=kind, shape=(613,), dtype=dtype, op=op, root=index, seed=index)
        for index, (dtype, op) in enumerate((dtype, op) for dtype in DTYPES for op in ops_of(dtype))
        for kind in REDUCING
    ]
    assert_reports(testing.run_ranks(run_all, num_ranks, calls, [range(num_ranks)]), at_least=len(calls))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_layouts_scalars_and_more_dimensions(num_ranks: int) -> None:
    calls = _taking_turns(list(KINDS), SMALL_SHAPES, rounds=3)
    expanded = [
        Call(kind=kind, shape=(5, 33), dtype=torch.float32, seed=index, input_layout="expanded", output_layout=layout)
        for index, kind in enumerate(KINDS)
        for layout in LAYOUTS
    ]
    reports = testing.run_ranks(run_all, num_ranks, calls + expanded, [range(num_ranks)])
    assert_reports(reports, at_least=num_ranks * len(calls))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sizes_beside_round_numbers(num_ranks: int) -> None:
    """One byte less and more than what buffers are likely to hold, and than a third of it."""
    edges = [2**14, 2**19, 2**20, 2**20 // 3, 2**20 // 3 // 64 * 64]
    calls = [
        Call(kind=kind, shape=(edge + off,), dtype=torch.uint8, seed=index, root=index)
        for index, kind in enumerate(KINDS)
        for edge in edges
        for off in ((-1, 0, 1) if index % 2 else (0, 1))
    ]
    reports = testing.run_ranks(run_all, num_ranks, calls, [range(num_ranks)])
    assert_reports(reports, at_least=num_ranks * len(calls))


def test_every_root() -> None:
    calls = [
        Call(kind=kind, shape=(41, 3), dtype=torch.float64, root=root, seed=root)
        for kind in ROOTED
        for root in range(4)
    ]
    assert_reports(testing.run_ranks(run_all, 4, calls, [range(4), [1, 2, 3]]), at_least=4 * len(calls))


def test_a_group_of_one_rank() -> None:
    calls = _taking_turns(list(KINDS), SMALL_SHAPES)
    assert_reports(testing.run_ranks(run_all, 2, calls, [[1]]), at_least=len(calls))


LARGE = [
    (2, Call(kind="all_reduce", shape=(2**24,), dtype=torch.float32)),
    (3, Call(kind="all_reduce", shape=(2**24 + 5,), dtype=torch.int32)),
    (2, Call(kind="broadcast", shape=(2**26,), dtype=torch.uint8, root=1)),
    (2, Call(kind="all_gather_tensor", shape=(2**22, 2), dtype=torch.float32)),
    (2, Call(kind="reduce_scatter_tensor", shape=(2**22,), dtype=torch.int64)),
    (2, Call(kind="all_to_all_single", shape=(2**22,), dtype=torch.float64)),
    (2, Call(kind="gather", shape=(2**23,), dtype=torch.bfloat16, root=1)),
]


@pytest.mark.parametrize("num_ranks", [2, 3] if FULL_GRID else [3])
def test_64_mebibytes(num_ranks: int) -> None:
    calls = [call for num, call in LARGE if num == num_ranks]
    assert_reports(testing.run_ranks(_large, num_ranks, calls), at_least=len(calls))


def _large(calls: Sequence[Call]) -> Report:
    report = Report()
    with backends.groups_of([range(dist.get_world_size())]) as (group,):
        for call in calls:
            run(call, group, async_op=True).check(report, str(call))
    return report


def _telling_sums(dtype: torch.dtype) -> list[torch.Tensor]:
    """Four ranks' numbers whose sum is another one in every other order, or with every step rounded to the dtype."""
    # Adding `one` to `big` changes nothing: in the dtype, or in float32 for the halves.
    one, big = {torch.float64: (1.0, 2.0**54), torch.float16: (2.0**-10, 2.0**15)}.get(dtype, (1.0, 2.0**25))
    step = 2.0 * one / torch.finfo(dtype).eps  # where adding `one` is lost once it is rounded to the dtype
    inf, nan = float("inf"), float("nan")
    columns = [
        (big, one, -big, one),
        (one, big, -big, one),
        (one, big, one, -big),
        (big, -big, one, one),
        (step, one, one, one),
        (inf, one, one, one),
        (one, inf, -inf, one),
        (one, one, nan, one),
        (-0.0, -0.0, -0.0, -0.0),
    ]
    return [torch.tensor(row, dtype=dtype) for row in zip(*columns, strict=True)]


def _rank_order_sums() -> Report:
    report = Report()
    with backends.groups_of([range(4)]) as (group,):
        for dtype in FLOATS:
            parts = _telling_sums(dtype)
            expected = reduced(parts, "sum")
            for repeat in (1, 7, 40_000):  # one block, an odd number of them, many
                tensor = parts[group.rank()].repeat(repeat)
                dist.all_reduce(tensor, group=group)
                whole = expected.repeat(repeat)
                label = f"{dtype} x {repeat}"
                report.equal(f"{label}: not a number", tensor.isnan().tolist(), whole.isnan().tolist())
                report.same_on_all_ranks(label, tensor.nan_to_num(nan=0.5))
                if backends.ADDS_IN_RANK_ORDER:
                    report.bits(label, tensor.nan_to_num(nan=0.5), whole.nan_to_num(nan=0.5))
    return report


def test_float_sums_are_added_in_rank_order() -> None:
    assert_reports(testing.run_ranks(_rank_order_sums, 4), at_least=4 * 3 * len(FLOATS))


def test_the_order_of_a_sum_can_be_seen() -> None:
    # The test above would pass for any order if these numbers did not tell one from another.
    for dtype in FLOATS:
        parts = _telling_sums(dtype)
        expected = reduced(parts, "sum")[:5]
        for order in itertools.permutations(range(4)):
            same_by_algebra = set(order[:2]) == {0, 1} and order[2:] == (2, 3)
            assert torch.equal(reduced([parts[i] for i in order], "sum")[:5], expected) == same_by_algebra, (
                dtype,
                order,
            )
    for dtype in HALVES:
        parts = _telling_sums(dtype)
        rounded = parts[0] + parts[1] + parts[2] + parts[3]
        assert not torch.equal(reduced(parts, "sum")[4], rounded[4])


def test_a_wrong_result_is_found() -> None:
    report = Report()
    right = torch.arange(6.0).reshape(2, 3)
    report.bits("right", right.clone(), right)
    wrong = right.clone()
    wrong[1, 2] = 7.0
    report.bits("one entry", wrong, right)
    report.bits("shape", right.T, right)
    report.bits("zero", torch.tensor([-0.0]), torch.tensor([0.0]))
    report.close("far", wrong, right, torch.full_like(right, 0.5))
    report.close("not a number", torch.tensor([float("nan")]), torch.ones(1), torch.ones(1))
    assert (report.checks, len(report.failures)) == (6, 5)
    assert "1 of 6 entries differ, from [1, 2] to [1, 2]; the first is 7.0 instead of 5.0" in report.failures[0]
    with pytest.raises(AssertionError, match="rank 1: one entry"):
        assert_reports([Report(checks=1), report])
    first, second = Report(checks=1), Report(checks=1)
    first.same_on_all_ranks("sum", right)
    second.same_on_all_ranks("sum", wrong)
    with pytest.raises(AssertionError, match="the ranks hold different bits"):
        assert_reports([first, second])
    with pytest.raises(AssertionError, match="only 1 checks were made"):
        assert_reports([Report(checks=1)], at_least=2)
