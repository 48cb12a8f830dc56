"""Layouts: the part of a full tensor that one rank holds, as data beside the tensor.

[Note: blocks] Tensor parallelism gives a rank a *block*: the full tensor, or intervals of it along one dim, joined in
their order. One interval is the rule. A fused weight, such as the query, key and value projections of attention in one
tensor, is cut group by group, so that each rank has whole queries with their keys and values:

    groups (4, 2, 2)   q0 q1 q2 q3  k0 k1  v0 v1
    part 0 of 2        q0 q1        k0     v0       ranges (0, 2) (4, 5) (6, 7)
    part 1 of 2              q2 q3     k1     v1    ranges (2, 4) (5, 6) (7, 8)

ZeRO then cuts the flattened block once more; `flat` is a rank's interval of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self, TypeAlias

from meshwright.values import Problems, Value

__all__: list[str] = []

Interval: TypeAlias = tuple[int, int]
"""(start, stop) with 0 <= start <= stop; stop is not part of it."""


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of contiguous shares that differ by at most 1: the first `size % parts` have one more.

    Args:
        size: Items to share [count].
        parts: Number of shares, at least 1 [count]. Where there are more shares than items, the last ones are empty.

    Raises:
        ConfigError: A number is too small.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    >>> even_sizes(2, 4)
    (1, 1, 0, 0)
    """
    problems = Problems("shares")
    problems.require(size >= 0, f"size={size} (rule: size is at least 0)", fix="size=0")
    problems.require(parts >= 1, f"parts={parts} (rule: parts is at least 1)", fix="parts=1")
    problems.check()
    small, extra = divmod(size, parts)
    return (small + 1,) * extra + (small,) * (parts - extra)


def even_ranges(size: int, parts: int) -> tuple[Interval, ...]:
    """Return the contiguous shares of `even_sizes` as intervals.

    Raises:
        ConfigError: A number is too small.

    >>> even_ranges(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    ranges: list[Interval] = []
    start = 0
    for share in even_sizes(size, parts):
        ranges.append((start, start + share))
        start += share
    return tuple(ranges)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout(Value):
    """The part of a full tensor that one rank holds. See [Note: blocks].

    Args:
        shape: Shape of the full tensor.
        dim: The dim along which the block is cut; None means that the block is the full tensor.
        ranges: Disjoint intervals (start, stop) along `dim`, joined in this order; none at all is an empty block.
        flat: Interval of the flattened block (row-major) that this rank holds, a tensor of one dim; None means the
            block in its own shape.

    Raises:
        ConfigError: An interval is outside its dim, is turned round or overlaps another.

    >>> layout = ShardLayout(shape=(6, 4), dim=0, ranges=((0, 2), (4, 5)))
    >>> layout.local_shape, layout.numel, layout.is_whole
    ((3, 4), 12, False)
    >>> layout.replace(flat=(6, 12)).local_shape
    (6,)
    """

    FORMAT: ClassVar[str] = "layout"

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("layout")
        problems.require(
            all(size >= 0 for size in self.shape), f"shape={list(self.shape)} (rule: sizes are at least 0)"
        )
        self._check_dim(problems)
        problems.check()
        if self.dim is not None:
            _check_intervals(self.ranges, self.shape[self.dim], f"along dim {self.dim}", problems)
            problems.check()
        if self.flat is not None:
            _check_intervals((self.flat,), self.block_numel, "of the flattened block", problems)
        problems.check()

    def _check_dim(self, problems: Problems) -> None:
        if self.dim is None:
            problems.require(
                not self.ranges,
                f"ranges={_text(self.ranges)} without a dim (rule: intervals lie along a dim)",
                fix="dim=0",
            )
        else:
            problems.require(
                0 <= self.dim < len(self.shape),
                f"dim={self.dim} of a tensor with {len(self.shape)} dims (rule: 0 <= dim < {len(self.shape)})",
                fix="dim=None" if not self.shape else f"dim={self.dim % len(self.shape)}",
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the layout of a rank that holds the full tensor."""
        return cls(shape=tuple(shape))

    @classmethod
    def cut(
        cls,
        shape: Sequence[int],
        dim: int,
        groups: Sequence[int],
        num_parts: int,
        part: int,
        *,
        units: Sequence[int] | None = None,
    ) -> Self:
        """Return one rank's layout of a tensor that is cut group by group along a dim.

        Args:
            shape: Shape of the full tensor.
            dim: The dim to cut.
            groups: Sizes of the groups that lie along it, for example `(q, k, v)`; one where nothing is fused.
            num_parts: Number of ranks [count].
            part: This rank, 0 .. num_parts - 1.
            units: For each group the number of entries that stay together, an attention head's for example; None is 1 [count].

        Returns:
            A layout with this rank's share of every group, by the rule of `even_sizes`, counted in units. Neighbouring
            intervals are joined and empty ones left out.

        Raises:
            ConfigError: The groups do not add up to the dim, or are no multiples of their units.

        >>> ShardLayout.cut((8, 3), 0, (4, 2, 2), num_parts=2, part=1).ranges
        ((2, 4), (5, 6), (7, 8))
        >>> ShardLayout.cut((12,), 0, (12,), num_parts=2, part=0, units=(4,)).ranges
        ((0, 8),)
        """
        units = (1,) * len(groups) if units is None else tuple(units)
        _check_cut(shape, dim, groups, units, num_parts=num_parts, part=part)
        ranges: list[Interval] = []
        offset = 0
        for size, unit in zip(groups, units, strict=True):
            start, stop = even_ranges(size // unit, num_parts)[part]
            ranges.append((offset + start * unit, offset + stop * unit))
            offset += size
        return cls(shape=tuple(shape), dim=dim, ranges=_merged(ranges))

    @property
    def full_numel(self) -> int:
        """Entries of the full tensor [count]."""
        return math.prod(self.shape)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the block, before `flat` cuts it."""
        if self.dim is None:
            return self.shape
        size = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def block_numel(self) -> int:
        """Entries of the block [count]."""
        return math.prod(self.block_shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this rank holds."""
        return self.block_shape if self.flat is None else (self.numel,)

    @property
    def numel(self) -> int:
        """Entries that this rank holds [count]."""
        return self.block_numel if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every entry, in the full tensor's order."""
        return self.has_whole_block and self.flat in (None, (0, self.full_numel))

    @property
    def has_whole_block(self) -> bool:
        """Whether the block is the full tensor, in its order."""
        return self.dim is None or _merged(self.ranges) == _merged([(0, self.shape[self.dim])])


def check_coverage(layouts: Sequence[ShardLayout]) -> None:
    """Check that the layouts of one tensor hold every entry exactly once.

    Ranks that hold copies are to be given once. Blocks are either equal or disjoint: pieces of `flat` are only put
    together with pieces of the same block.

    Args:
        layouts: One for each rank.

    Raises:
        ConfigError: Entries are missing or held twice; the message says which.

    >>> check_coverage([ShardLayout.cut((7,), 0, (7,), 3, part) for part in range(3)])
    """
    problems = Problems("layouts")
    problems.require(bool(layouts), "there are none (rule: together they hold every entry once)")
    shapes = sorted({layout.shape for layout in layouts})
    problems.require(len(shapes) <= 1, f"they are of different tensors: shapes {[list(shape) for shape in shapes]}")
    problems.check()
    blocks: dict[tuple[int | None, tuple[Interval, ...]], list[Interval]] = {}
    sizes: dict[tuple[int | None, tuple[Interval, ...]], int] = {}
    for layout in layouts:
        if layout.numel:
            key = (None, ()) if layout.has_whole_block else (layout.dim, _merged(layout.ranges))
            blocks.setdefault(key, []).append(layout.flat or (0, layout.block_numel))
            sizes[key] = layout.block_numel
    for (dim, ranges), pieces in blocks.items():
        where = "of the flattened tensor" if dim is None else f"of the flattened block {_text(ranges)} of dim {dim}"
        _check_tiling(pieces, sizes[(dim, ranges)], where, problems)
    _check_blocks(list(blocks), shapes[0], problems)
    problems.check()


def _check_blocks(
    blocks: list[tuple[int | None, tuple[Interval, ...]]], shape: tuple[int, ...], problems: Problems
) -> None:
    if not blocks:
        problems.require(not math.prod(shape), f"no entry of {list(shape)} is held by anybody")
        return
    dims = {dim for dim, _ in blocks}
    if len(dims) > 1:
        # Rows and columns always meet somewhere, and the full tensor meets everything.
        names = ", ".join("the full tensor" if dim is None else f"dim {dim}" for dim in sorted(dims, key=str))
        problems.add(f"blocks along {names} overlap (rule: all are cut along one dim)")
        return
    (dim,) = dims
    if dim is not None:
        _check_tiling([r for _, ranges in blocks for r in ranges], shape[dim], f"along dim {dim}", problems)


def _check_tiling(intervals: Iterable[Interval], size: int, where: str, problems: Problems) -> None:
    position = 0
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        problems.require(start <= position, f"{position}..{start} {where} is held by nobody")
        problems.require(start >= position, f"{start}..{min(position, stop)} {where} is held twice")
        position = max(position, stop)
    problems.require(position >= size, f"{position}..{size} {where} is held by nobody")


def _check_intervals(intervals: Sequence[Sequence[int]], size: int, where: str, problems: Problems) -> None:
    for interval in intervals:
        if len(interval) != 2:
            problems.add(f"{list(interval)} {where} has {len(interval)} numbers (rule: (start, stop))")
        elif not 0 <= interval[0] <= interval[1] <= size:
            problems.add(f"({interval[0]}, {interval[1]}) {where} (rule: 0 <= start <= stop <= {size})")
    if problems:
        return
    ascending = sorted((start, stop) for start, stop in intervals if start < stop)
    for (_, stop), (start, after) in itertools.pairwise(ascending):
        problems.require(stop <= start, f"{start}..{min(stop, after)} {where} is in two intervals (rule: disjoint)")


def _check_cut(
    shape: Sequence[int], dim: int, groups: Sequence[int], units: Sequence[int], *, num_parts: int, part: int
) -> None:
    problems = Problems("layout")
    problems.require(
        0 <= dim < len(shape), f"dim={dim} of a tensor with {len(shape)} dims (rule: 0 <= dim < {len(shape)})"
    )
    problems.require(num_parts >= 1, f"num_parts={num_parts} (rule: num_parts is at least 1)", fix="num_parts=1")
    problems.require(0 <= part < num_parts, f"part={part} of {num_parts} (rule: 0 <= part < num_parts)")
    problems.require(
        len(units) == len(groups), f"{len(units)} units for {len(groups)} groups (rule: one for each)", fix="units=None"
    )
    problems.check()
    problems.require(
        sum(groups) == shape[dim] and all(size >= 0 for size in groups),
        f"groups {list(groups)} add up to {sum(groups)}, dim {dim} has {shape[dim]} (rule: they share the dim)",
        fix=f"groups=({shape[dim]},)",
    )
    for size, unit in zip(groups, units, strict=True):
        problems.require(
            unit >= 1 and size % max(unit, 1) == 0,
            f"a group of {size} in units of {unit} (rule: whole units, each at least 1)",
            fix="units=None",
        )
    problems.check()


def _merged(ranges: Iterable[Interval]) -> tuple[Interval, ...]:
    """Join neighbours and leave out empty intervals; what is held, and in which order, stays the same."""
    merged: list[Interval] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def _text(ranges: Iterable[Interval]) -> str:
    return " ".join(f"{start}..{stop}" for start, stop in ranges)
