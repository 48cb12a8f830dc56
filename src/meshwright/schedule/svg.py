"""A simulated schedule as SVG, for notebooks: a lane for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshwright.schedule.action import Action
from meshwright.schedule.simulate import Simulation

__all__: list[str] = []

WIDTH: Final = 900.0
LANE: Final = 26
LEFT: Final = 70
MOST_CELLS: Final = 4096
"""Cells that are drawn; later ranks of larger schedules are left out [count]."""
_COLOURS: Final = {"F": "#6aa5e3", "B": "#64b98a", "I": "#64b98a", "W": "#b5ddb0"}


def schedule_svg(actions: Sequence[Sequence[Action]], simulation: Simulation) -> str:
    """Return the drawing.

    Args:
        actions: [rank][slot] -> action.
        simulation: When each of them runs.
    """
    scale = WIDTH / simulation.makespan_s if simulation.makespan_s > 0 else 0.0
    lanes: list[str] = []
    num_cells = 0
    for rank, row in enumerate(actions):
        num_cells += len(row)
        if num_cells > MOST_CELLS:
            break
        y = rank * LANE
        lanes.append(f'<text x="{LEFT - 6}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        for action, start, end in zip(row, simulation.starts[rank], simulation.ends[rank], strict=True):
            x, width = LEFT + start * scale, (end - start) * scale
            lanes.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="20" fill="{_COLOURS[action.kind]}" '
                f'stroke="#ffffff" stroke-width="0.5"><title>{action}</title></rect>'
            )
            if width >= 7 * len(str(action)):
                lanes.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" fill="#101316">{action}</text>'
                )
    height = LANE * len(actions)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="schedule of {len(actions)} ranks" '
        f'viewBox="0 0 {LEFT + WIDTH + 4:.0f} {height}" width="{LEFT + WIDTH + 4:.0f}" '
        f'style="font: 11px sans-serif; fill: currentColor; max-width: 100%">{"".join(lanes)}</svg>'
    )
