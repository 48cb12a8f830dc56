"""Pictures as data for the page's SVG: the mesh of devices, and bars. Positions in pixels; colours are the page's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from meshwright.spec.plan import Plan

__all__: list[str] = []

MOST_DEVICES: Final = 256
"""Devices that the picture of a mesh draws [count]."""
BOX_WIDTH: Final = 72
BOX_HEIGHT: Final = 40
GAP: Final = 8
GROUP_GAP: Final = 20
LEFT: Final = 64
TOP: Final = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A device in the picture: its place, its number and its coordinates."""

    x: int
    y: int
    label: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshPicture:
    """The mesh: pipeline ranks from top to bottom, copies from left to right, tensor ranks side by side."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    row_labels: tuple[tuple[int, str], ...]
    column_labels: tuple[tuple[int, str], ...]
    text: str
    num_left_out: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar: its place, its length, and what is written beside it."""

    y: int
    width: float
    label: str
    value: str


def draw_mesh(plan: Plan) -> MeshPicture:
    """Return the picture of a plan's devices, in the order of axes pp, dp, cp, tp."""
    word = "rank" if plan.mode == "ranks" else "device"
    per_group = plan.tp
    groups = plan.dp * plan.cp
    group_width = per_group * (BOX_WIDTH + GAP) + GROUP_GAP
    mesh = plan.mesh
    boxes: list[Box] = []
    for number in range(min(plan.num_devices, MOST_DEVICES)):
        pp, dp, cp, tp = mesh.coordinate(number)
        x = LEFT + (dp * plan.cp + cp) * group_width + tp * (BOX_WIDTH + GAP)
        y = TOP + pp * (BOX_HEIGHT + GAP)
        axes = (("pp", pp, plan.pp), ("dp", dp, plan.dp), ("cp", cp, plan.cp), ("tp", tp, plan.tp))
        detail = " ".join(f"{axis}{place}" for axis, place, degree in axes if degree > 1)
        boxes.append(Box(x=x, y=y, label=f"{word} {number}", detail=detail))
    rows = 1 + max((box.y - TOP) // (BOX_HEIGHT + GAP) for box in boxes)
    return MeshPicture(
        width=max(box.x for box in boxes) + BOX_WIDTH + GAP,
        height=TOP + rows * (BOX_HEIGHT + GAP),
        boxes=tuple(boxes),
        row_labels=tuple((TOP + row * (BOX_HEIGHT + GAP), f"pp {row}") for row in range(rows)) if plan.pp > 1 else (),
        column_labels=_column_labels(plan, groups, group_width, boxes),
        text=_mesh_text(plan, word),
        num_left_out=plan.num_devices - len(boxes),
    )


def _column_labels(plan: Plan, groups: int, group_width: int, boxes: Sequence[Box]) -> tuple[tuple[int, str], ...]:
    if groups == 1:
        return ()
    widest = max(box.x for box in boxes)
    labels: list[tuple[int, str]] = []
    for group in range(groups):
        dp, cp = divmod(group, plan.cp)
        x = LEFT + group * group_width
        if x <= widest:
            labels.append((x, f"dp {dp}" + (f" cp {cp}" if plan.cp > 1 else "")))
    return tuple(labels)


def _mesh_text(plan: Plan, word: str) -> str:
    """Return what the picture shows, for those who do not see it."""
    means = {
        "pp": "pipeline ranks run different layers (rows)",
        "dp": "data parallel ranks take different samples (groups)",
        "cp": "context parallel ranks take different parts of the sequence",
        "tp": "tensor parallel ranks hold different parts of each layer (neighbours)",
    }
    parts = [f"{getattr(plan, axis)} {text}" for axis, text in means.items() if getattr(plan, axis) > 1]
    return f"{plan.num_devices} {word}{'' if plan.num_devices == 1 else 's'}" + (
        f": {'; '.join(parts)}" if parts else ""
    )


def draw_bars(values: Sequence[tuple[str, float, str]], width: float = 420.0) -> list[Bar]:
    """Return bars whose lengths are to one scale.

    Args:
        values: Label, number that is not negative, and the number as text.
        width: Length of the longest [px].
    """
    most = max((number for _, number, _ in values), default=0.0)
    return [
        Bar(y=index * 26, width=round(width * number / most, 2) if most > 0 else 0.0, label=label, value=text)
        for index, (label, number, text) in enumerate(values)
    ]
