from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import layout as module
from meshwright.errors import ConfigError
from meshwright.layout import ShardLayout, check_coverage, even_ranges, even_sizes
from meshwright.nn import join_shards, shards, take_shard


@st.composite
def cuts(draw) -> list[ShardLayout]:
    """All ranks' layouts of one tensor: cut along a dim in groups and units, or not, and then perhaps by ZeRO."""
    num_parts = draw(st.integers(1, 5))
    units = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    groups = [unit * draw(st.integers(0, 6)) for unit in units]
    rest = draw(st.lists(st.integers(0, 4), max_size=2))
    dim = draw(st.integers(0, len(rest)))
    shape = (*rest[:dim], sum(groups), *rest[dim:])
    blocks = [ShardLayout.cut(shape, dim, groups, num_parts, part, units=units) for part in range(num_parts)]
    if draw(st.booleans()):
        blocks = [ShardLayout.whole(shape)]
    num_flat = draw(st.integers(0, 3))
    if not num_flat:
        return blocks
    return [block.replace(flat=piece) for block in blocks for piece in even_ranges(block.block_numel, num_flat)]


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)


@pytest.mark.parametrize("source", [module, shards])
def test_examples_are_true(source) -> None:
    result = doctest.testmod(source, extraglobs={"ShardLayout": ShardLayout})
    assert (result.failed, result.attempted > 0) == (0, True)


@given(st.integers(0, 100), st.integers(1, 12))
def test_shares_are_contiguous_even_and_the_larger_ones_first(size: int, parts: int) -> None:
    sizes, ranges = even_sizes(size, parts), even_ranges(size, parts)
    assert sum(sizes) == size
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert sizes.count(max(sizes)) == (size % parts or parts)
    assert [stop - start for start, stop in ranges] == list(sizes)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(size))


@given(cuts())
def test_json_round_trip(layouts: list[ShardLayout]) -> None:
    for layout in layouts:
        copy = ShardLayout.from_json(layout.to_json())
        assert copy == layout
        assert (copy.hash, hash(copy)) == (layout.hash, hash(layout))


@given(cuts())
def test_what_is_cut_covers_the_tensor_and_joins_to_it(layouts: list[ShardLayout]) -> None:
    check_coverage(layouts)
    full = _numbered(layouts[0].shape)
    parts = [take_shard(full, layout) for layout in layouts]
    for part, layout in zip(parts, layouts, strict=True):
        assert tuple(part.shape) == layout.local_shape
        assert part.numel() == layout.numel
        is_same = part.numel() == full.numel() and torch.equal(part.flatten(), full.flatten())
        assert layout.is_whole == is_same or not full.numel()
    assert sum(layout.numel for layout in layouts) == layouts[0].full_numel
    assert torch.equal(join_shards(parts, layouts), full)


@given(cuts(), st.data())
def test_a_missing_or_doubled_part_is_found(layouts: list[ShardLayout], data) -> None:
    held = [index for index, layout in enumerate(layouts) if layout.numel]
    if not held:
        return
    index = data.draw(st.sampled_from(held))
    with pytest.raises(ConfigError, match=r"held by (nobody|anybody)|there are none"):
        check_coverage(layouts[:index] + layouts[index + 1 :])
    with pytest.raises(ConfigError, match="held twice"):
        check_coverage([*layouts, layouts[index]])


def test_parts_cut_along_different_dims_overlap() -> None:
    rows = [ShardLayout.cut((4, 4), 0, (4,), 2, part) for part in range(2)]
    with pytest.raises(ConfigError, match="dim 0, dim 1 overlap"):
        check_coverage([rows[0], ShardLayout.cut((4, 4), 1, (4,), 2, 1)])
    with pytest.raises(ConfigError, match="dim 0, the full tensor overlap"):
        check_coverage([*rows, ShardLayout.whole((4, 4))])
    with pytest.raises(ConfigError, match="different tensors"):
        check_coverage([rows[0], ShardLayout.cut((4, 5), 0, (4,), 2, 1)])
    with pytest.raises(ConfigError, match=r"3\.\.4 along dim 0 is held by nobody"):
        check_coverage([rows[0], ShardLayout(shape=(4, 4), dim=0, ranges=((2, 3),))])


def test_fused_groups_are_cut_one_by_one() -> None:
    layouts = [ShardLayout.cut((14,), 0, (8, 4, 2), 3, part, units=(4, 2, 1)) for part in range(3)]
    assert [layout.ranges for layout in layouts] == [((0, 4), (8, 10), (12, 13)), ((4, 8), (10, 12), (13, 14)), ()]
    assert [layout.numel for layout in layouts] == [7, 7, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (4,), "dim": 1, "ranges": ((0, 1),)}, r"dim=1 of a tensor with 1 dims \(rule: 0 <= dim < 1\)"),
        ({"shape": (4,), "dim": -1, "ranges": ((0, 1),)}, "dim=-1"),
        ({"shape": (4,), "ranges": ((0, 1),)}, "without a dim"),
        ({"shape": (4,), "dim": 0, "ranges": ((0, 5),)}, r"\(0, 5\) along dim 0 \(rule: 0 <= start <= stop <= 4\)"),
        ({"shape": (4,), "dim": 0, "ranges": ((2, 1),)}, r"\(2, 1\)"),
        ({"shape": (4,), "dim": 0, "ranges": ((0, 2), (1, 3))}, r"1\.\.2 along dim 0 is in two intervals"),
        ({"shape": (4,), "dim": 0, "ranges": ((0, 2, 3),)}, "3 numbers"),
        ({"shape": (4, 2), "dim": 0, "ranges": ((0, 1),), "flat": (0, 3)}, r"flattened block \(rule: .* <= 2\)"),
        ({"shape": (-1,)}, "at least 0"),
        ({"shape": (1.5,)}, "must be a whole number"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(fields, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardLayout(**fields)


@pytest.mark.parametrize(
    ("arguments", "units", "message"),
    [
        (((6,), 0, (4, 1), 2, 0), None, "add up to 5, dim 0 has 6"),
        (((6,), 0, (6,), 2, 0), (4,), "a group of 6 in units of 4"),
        (((6,), 0, (6,), 2, 0), (0,), "units of 0"),
        (((6,), 0, (4, 2), 2, 0), (2,), "1 units for 2 groups"),
        (((6,), 1, (6,), 2, 0), None, "dim=1"),
        (((6,), 0, (6,), 0, 0), None, "num_parts=0"),
        (((6,), 0, (6,), 2, 2), None, "part=2 of 2"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(arguments, units, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardLayout.cut(*arguments, units=units)


def test_shards_that_do_not_fit_are_refused() -> None:
    layouts = [ShardLayout.cut((4,), 0, (4,), 2, part) for part in range(2)]
    with pytest.raises(ConfigError, match=r"shape \[5\] for a layout of \[4\]"):
        take_shard(torch.zeros(5), layouts[0])
    with pytest.raises(ConfigError, match=r"shape \[3\] for a layout of \[2\]"):
        join_shards([torch.zeros(2), torch.zeros(3)], layouts)
    with pytest.raises(ConfigError, match="1 shards for 2 layouts"):
        join_shards([torch.zeros(2)], layouts)


@pytest.mark.parametrize("groups", [(8,), (4, 4)])
def test_a_shard_is_contiguous_whatever_the_memory_format_is(groups: tuple[int, ...]) -> None:
    full = _numbered((8, 4, 3, 3)).to(memory_format=torch.channels_last)
    shard = take_shard(full, ShardLayout.cut((8, 4, 3, 3), 0, groups, num_parts=2, part=0))
    assert shard.is_contiguous()


def test_a_shard_is_a_copy() -> None:
    full = torch.zeros(4)
    for layout in (ShardLayout.whole((4,)), ShardLayout.cut((4,), 0, (4,), 2, 0)):
        take_shard(full, layout).add_(1)
    assert not full.any()
