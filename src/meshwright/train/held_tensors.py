"""Listing of the parts of each parameter and buffer that each rank holds, for the run's record and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.apply.held_state import HeldPart
from meshwright.layout import ShardLayout

__all__: list[str] = []

MOST_ENTRIES = 20_000
"""Texts that a record gets at most: some 2 MB [count]."""

ListedPart = tuple[str, list[int], str]
"""FQN, shape of the full tensor, and the part in words."""


def list_parts(parts: Sequence[HeldPart]) -> list[ListedPart]:
    """Return a rank's parts as plain JSON data; what it holds nothing of is left out."""
    return [
        (part.name, list(part.full_shape), part_text(part.layout, part.order)) for part in parts if part.layout.numel
    ]


def part_text(layout: ShardLayout, order: Sequence[int] = ()) -> str:
    """Return a part in words: intervals along a dim of the full tensor, or entries of the flattened block.

    Args:
        layout: The part.
        order: The full tensor's dims in the order of the layout's; () for its own order.

    >>> part_text(ShardLayout(shape=(6, 4), dim=0, ranges=((0, 2), (4, 5))))
    'dim 0: 0-2, 4-5 of 6'
    >>> part_text(ShardLayout(shape=(6, 4), flat=(0, 12)))
    'entries 0-12 of 24'
    """
    if layout.is_whole:
        return "whole"
    words: list[str] = []
    if not layout.has_whole_block and layout.dim is not None:
        dim = order[layout.dim] if order else layout.dim
        intervals = ", ".join(f"{start}-{stop}" for start, stop in layout.ranges)
        words.append(f"dim {dim}: {intervals} of {layout.shape[layout.dim]}")
    if layout.flat is not None and layout.flat != (0, layout.block_numel):
        words.append(f"entries {layout.flat[0]}-{layout.flat[1]} of {layout.block_numel}")
    return "; ".join(words) or "whole"


def join_ranks(listed: Sequence[Sequence[ListedPart]]) -> tuple[dict[str, dict[str, object]], int]:
    """Return the parts of all ranks by tensor, and how many tensors were left out because there are too many entries.

    Args:
        listed: `list_parts` of each rank, in the order of the ranks.

    Returns:
        FQN -> {"shape", "held": {ranks: part}}; equal parts of several ranks stand once. The largest tensors are kept first.

    >>> join_ranks([[("w", [4], "whole")], [("w", [4], "whole")]])
    ({'w': {'shape': [4], 'held': {'0-1': 'whole'}}}, 0)
    """
    ranks: dict[str, dict[str, list[int]]] = {}
    shapes: dict[str, list[int]] = {}
    for rank, parts in enumerate(listed):
        for name, shape, text in parts:
            shapes.setdefault(name, list(shape))
            ranks.setdefault(name, {}).setdefault(text, []).append(rank)
    kept = _largest(shapes, ranks)
    table: dict[str, dict[str, object]] = {
        name: {"shape": shapes[name], "held": {ranks_text(where): text for text, where in ranks[name].items()}}
        for name in shapes
        if name in kept
    }
    return table, len(shapes) - len(kept)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as intervals.

    >>> ranks_text([0, 1, 2, 5])
    '0-2,5'
    """
    words: list[str] = []
    first = last = ranks[0]
    for rank in (*ranks[1:], -1):
        if rank == last + 1:
            last = rank
            continue
        words.append(str(first) if first == last else f"{first}-{last}")
        first = last = rank
    return ",".join(words)


def _largest(shapes: Mapping[str, Sequence[int]], ranks: Mapping[str, Mapping[str, Sequence[int]]]) -> set[str]:
    """Return the tensors that the record has room for, the largest first."""
    kept: set[str] = set()
    room = MOST_ENTRIES
    for name in sorted(shapes, key=lambda name: -_numel(shapes[name])):
        room -= len(ranks[name])
        if room < 0:
            break
        kept.add(name)
    return kept


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
