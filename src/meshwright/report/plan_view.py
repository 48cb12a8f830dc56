"""The plan as tables: layers x ranks, every tensor's parts, and the ranks' places in the mesh."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Final

from meshwright.spec.plan import Plan
from meshwright.spec.record import HeldTensor, RunRecord

__all__: list[str] = []

MOST_COLUMNS: Final = 128
"""Columns of ranks that are shown [count]."""
MOST_LAYERS: Final = 1000
"""Layers that are shown [count]."""
MOST_TENSORS: Final = 2000
"""Tensors that are listed one by one [count]."""
MOST_RANKS: Final = 1 << 16
"""Ranks that a record may name [count]."""

_DIM: Final = re.compile(r"dim \d{1,3}: (\d{1,18}-\d{1,18}(?:, \d{1,18}-\d{1,18})*) of (\d{1,18})")
_ENTRIES: Final = re.compile(r"entries (\d{1,18})-(\d{1,18}) of \d{1,18}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCell:
    """What the ranks of a column hold of a layer.

    Args:
        fraction: Share of its entries, 0 to 1; None where that cannot be read.
        text: The same for people.
    """

    fraction: float | None
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer: the tensors of one module.

    Args:
        name: The module's name.
        numel: Entries of its tensors [count].
        stage: Its pipeline stage; None where the plan names none.
        cells: One for each column.
    """

    name: str
    numel: int
    stage: int | None
    cells: tuple[LayerCell, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor: its shape, how the plan lays it out, and its parts."""

    name: str
    shape: str
    layout: str
    parts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """The tables of a plan.

    Args:
        columns: Ranks of each column: those that hold the same.
        layers: Rows of the layers.
        tensors: Rows of the tensors.
        remarks: What was left out, and how to read the tables.
    """

    columns: tuple[str, ...]
    layers: tuple[LayerRow, ...]
    tensors: tuple[TensorRow, ...]
    remarks: tuple[str, ...]


def view_plan(plan: Plan, record: RunRecord | None) -> PlanView:
    """Return the tables of a plan.

    Args:
        plan: The plan.
        record: The run's record, which says what each rank held; None where it cannot be read.
    """
    tensors: Mapping[str, HeldTensor] = record.tensors if record is not None else {}
    remarks: list[str] = []
    held = {name: _by_rank(tensor) for name, tensor in tensors.items()}
    num_ranks = max((rank + 1 for parts in held.values() for rank in parts), default=0)
    num_ranks = max(num_ranks, plan.num_ranks if plan.num_ranks <= MOST_RANKS else 0)
    groups = _equal_ranks(held, num_ranks) if held else []
    if len(groups) > MOST_COLUMNS:
        remarks.append(f"{len(groups) - MOST_COLUMNS} more columns of ranks are not shown")
        groups = groups[:MOST_COLUMNS]
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    rows = [
        _layer_row(layer, names, tensors, held, groups=groups, plan=plan)
        for layer, names in list(layers.items())[:MOST_LAYERS]
    ]
    if len(layers) > MOST_LAYERS:
        remarks.append(f"{len(layers) - MOST_LAYERS} more layers are not shown")
    listed = list(tensors or plan.layouts)
    if len(listed) > MOST_TENSORS:
        remarks.append(f"{len(listed) - MOST_TENSORS} more tensors are not listed")
    if record is not None and record.num_tensors_left_out:
        remarks.append(f"the record leaves out {record.num_tensors_left_out} small tensors, since there are too many")
    remarks += _how_to_read(plan, has_tensors=bool(tensors))
    return PlanView(
        columns=tuple(_ranks_text(group) for group in groups),
        layers=tuple(rows),
        tensors=tuple(_tensor_row(name, tensors.get(name), plan) for name in listed[:MOST_TENSORS]),
        remarks=tuple(remarks),
    )


def held_numel(text: str, shape: tuple[int, ...]) -> int | None:
    """Return how many entries of a tensor a part has, from its words; None where they cannot be read.

    >>> held_numel("dim 0: 0-2, 4-5 of 6", (6, 4)), held_numel("entries 0-5 of 12", (6, 4)), held_numel("?", (6, 4))
    (12, 5, None)
    """
    if text == "whole":
        return math.prod(shape)
    if (entries := _ENTRIES.search(text)) is not None:
        return max(0, int(entries[2]) - int(entries[1]))
    if (cut := _DIM.fullmatch(text)) is None or int(cut[2]) == 0:
        return None
    pairs = [interval.split("-") for interval in cut[1].split(", ")]
    return math.prod(shape) * sum(int(stop) - int(start) for start, stop in pairs) // int(cut[2])


def _by_rank(tensor: HeldTensor) -> dict[int, str]:
    parts: dict[int, str] = {}
    for ranks, text in tensor.held.items():
        for word in ranks.split(","):
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
            if match is None:
                continue
            first = int(match[1])
            last = min(int(match[2] or first), MOST_RANKS)
            parts |= dict.fromkeys(range(first, last + 1), text)
    return parts


def _equal_ranks(held: Mapping[str, Mapping[int, str]], num_ranks: int) -> list[list[int]]:
    """Return the ranks in groups of those that hold the same parts of everything."""
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for rank in range(num_ranks):
        groups.setdefault(tuple(parts.get(rank) for parts in held.values()), []).append(rank)
    return list(groups.values())


def _layer_row(
    layer: str,
    names: list[str],
    tensors: Mapping[str, HeldTensor],
    held: Mapping[str, Mapping[int, str]],
    *,
    groups: list[list[int]],
    plan: Plan,
) -> LayerRow:
    total = sum(math.prod(tensors[name].shape) for name in names)
    cells: list[LayerCell] = []
    for group in groups:
        texts = [(name, held[name].get(group[0])) for name in names]
        sizes = [held_numel(text, tensors[name].shape) if text is not None else 0 for name, text in texts]
        if any(size is None for size in sizes):
            cells.append(LayerCell(fraction=None, text="?"))
            continue
        fraction = sum(size or 0 for size in sizes) / total if total else 0.0
        cells.append(LayerCell(fraction=min(1.0, fraction), text=_fraction_text(fraction)))
    return LayerRow(name=layer, numel=total, stage=_stage_of(layer, plan), cells=tuple(cells))


def _fraction_text(fraction: float) -> str:
    if fraction <= 0:
        return "-"
    return "whole" if fraction >= 1 else f"{fraction:.1%}"


def _stage_of(layer: str, plan: Plan) -> int | None:
    """Return the stage of a module, or of the nearest one around it that the plan names."""
    words = layer.split(".")
    for length in range(len(words), 0, -1):
        stage = plan.stages.get(".".join(words[:length]))
        if stage is not None:
            return stage
    return None


def _tensor_row(name: str, tensor: HeldTensor | None, plan: Plan) -> TensorRow:
    shape = " x ".join(map(str, tensor.shape)) or "one number" if tensor is not None else "not told"
    parts = tuple(tensor.held.items()) if tensor is not None else ()
    return TensorRow(name=name, shape=shape, layout=plan.layouts.get(name, ""), parts=parts)


def _how_to_read(plan: Plan, *, has_tensors: bool) -> list[str]:
    if not has_tensors:
        return ["What each rank held is not in the record: it is told after a run's first step."]
    remarks: list[str] = []
    if plan.zero in (1, 2):
        remarks.append(
            f"zero={plan.zero}: the table shows the part that a rank updates and saves; the values of all parameters of its "
            "layers are on every rank that computes with them."
        )
    if plan.zero == 3:
        remarks.append("zero=3: a rank keeps its part, and gathers a layer while it computes with it.")
        remarks.append("A tensor that ZeRO deals out whole stands with one rank.")
    if plan.mode == "data_parallel":
        remarks.append(f"One process: each of its {plan.dp} devices has a replica of everything that rank 0 holds.")
    if plan.mode == "model_parallel":
        remarks.append(f"One process: rank 0 spreads its layers over {plan.pp} devices.")
    return remarks


def _ranks_text(ranks: list[int]) -> str:
    words: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], -1]:
        if rank != previous + 1:
            words.append(str(start) if start == previous else f"{start}-{previous}")
            start = rank
        previous = rank
    return ", ".join(words)
