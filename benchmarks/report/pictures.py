"""Pictures for README and pages, as SVG files with a light background.

    meshwright train examples/gpt_python.toml --plan pp=2,micro_batches=4 --trace 12-16 --set train.steps=18
    python benchmarks/report/pictures.py timeline runs/gpt_python/report.html docs/timeline.svg
    meshwright compare examples/gpt_python.toml --plans "single; dp=2; tp=2; pp=2,micro_batches=4" --steps 12 --json plans.json
    python benchmarks/report/pictures.py comparison plans.json docs/comparison.svg

The timeline is the report's own drawing, with the report's own light colours. The comparison has a bar for each plan.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from meshwright.compare.comparison import Comparison
from meshwright.units import format_seconds

LANES = re.compile(r'<svg class="lanes".*?viewBox="0 0 ([\d.]+) ([\d.]+)".*?>(.*?)</svg>', re.DOTALL)
COLOURS = {
    **{"forward": "#6aa5e3", "backward": "#64b98a", "input_grad": "#64b98a", "weight_grad": "#b5ddb0"},
    **{"optimizer": "#e59866", "recompute": "#b49be0", "load": "#c9a227", "step": "#d3d7dd", "exchange": "#8a5a2b"},
}
LEGEND = ("forward", "backward", "optimizer", "wait", "exchange")
STYLE = (
    "text{fill:#1a1d21;font:13px sans-serif}.small{font-size:11px;fill:#50565e}.in{font-size:11px}.mid{text-anchor:middle}"
    ".tick{stroke:#c9ced6;stroke-width:1}.k-wait{fill:#fff;stroke:#c0392b;stroke-width:.8}"
    + "".join(f".k-{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
)
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" role="img"><title>{t}</title><style>{s}</style>'
WIDTH, LEFT, ROW, TOP = 760, 200, 44, 62


def svg(title: str, width: float, height: float, parts: list[str]) -> str:
    head = HEAD.format(w=width, h=height, t=escape(title), s=STYLE)
    return "\n".join([head, f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>', *parts, "</svg>", ""])


def timeline(report: str) -> str:
    """Return the first traced step of a report as it ran, and the simulated schedule below it where there is one."""
    drawings = LANES.findall(report)
    if not drawings:
        sys.exit("the report has no traced step: train with --trace")
    parts, y = [], 36.0
    for place, kind in enumerate(LEGEND):
        x = 128 + 130 * place
        parts += [
            f'<rect class="k-{kind}" x="{x}" y="8" width="14" height="14"/>',
            f'<text x="{x + 20}" y="20">{kind}</text>',
        ]
    for (_, height, inside), title in zip(
        drawings[:2], ("one step as it ran", "the schedule as simulated"), strict=False
    ):
        parts += [
            f'<text x="128" y="{y + 14:.0f}">{title}</text>',
            f'<g transform="translate(0 {y + 20:.0f})">{inside}</g>',
        ]
        y += float(height) + 34
    return svg("A step of a pipeline, a lane for each rank", float(drawings[0][0]), y, parts)


def comparison(compared: Comparison) -> str:
    """Return a bar of the median step time for each plan, with the quartiles as a line."""
    spreads = [statistics.quantiles(row.trial.step_seconds, n=4) for row in compared.rows]
    scale = (WIDTH - LEFT - 170) / max(high for *_, high in spreads)
    parts = [
        f'<text x="16" y="24">{escape(compared.title)}</text>',
        '<text class="small" x="16" y="42">median step, with quartiles</text>',
    ]
    for place, (row, (low, median, high)) in enumerate(zip(compared.rows, spreads, strict=True)):
        y = TOP + ROW * place
        parts += [
            f'<text x="16" y="{y + 19}">{escape(row.trial.name)}</text>',
            f'<rect fill="#6aa5e3" x="{LEFT}" y="{y + 4}" width="{median * scale:.1f}" height="22"/>',
            f'<line stroke="#1a1d21" x1="{LEFT + low * scale:.1f}" x2="{LEFT + high * scale:.1f}" y1="{y + 15}" y2="{y + 15}"/>',
            f'<text x="{LEFT + high * scale + 10:.1f}" y="{y + 19}">{format_seconds(median)}</text>',
        ]
    return svg("Step times of plans", WIDTH, TOP + ROW * len(spreads) + 8, parts)


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("timeline", "comparison"):
        sys.exit(__doc__)
    kind, source, target = sys.argv[1], Path(sys.argv[2]).read_text(), Path(sys.argv[3])
    target.write_text(timeline(source) if kind == "timeline" else comparison(Comparison.from_json(source)))


if __name__ == "__main__":
    main()
