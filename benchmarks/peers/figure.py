"""The README's picture and table of step times, from the committed results: nothing in them is typed by hand.

python benchmarks/peers/figure.py            writes docs/steps.svg, and the table between two marks of README.md
python benchmarks/peers/figure.py --check    writes nothing; exit status 1 where either is not what the results give
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from cases import CASES
from table import Result, label, read_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PICTURE = ROOT / "docs" / "steps.svg"
README = ROOT / "README.md"
MARKED = re.compile(
    r"(?<=<!-- steps: made by benchmarks/peers/figure.py -->\n).*?(?=\n<!-- end of steps -->)", re.DOTALL
)

KINDS = {
    "distributed": ("dp=2", "data parallelism"),
    "zero2": ("dp=2,zero=2", "ZeRO-2"),
    "zero3": ("dp=2,zero=3", "ZeRO-3"),
    "tensor": ("tp=2", "tensor parallelism"),
    "pipeline": ("pp=2", "pipeline, zb-h1, head not tied"),
}
COLOURS = ("#9ecae1", "#4292c6", "#08519c")
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 190, 24, 66, 52
FULL = 1.2  # the axis ends here


@dataclasses.dataclass(frozen=True)
class Cell:
    """Our step's ratio to the fastest other library's, for one model."""

    num_parameters: int
    low: float
    median: float
    high: float
    best: str


def cell_of(result: Result, sides: dict[str, dict[str, int]]) -> Cell:
    summary = result.summary
    low, median, high = summary["rows"][summary["subject"]]["ratio_to_best"]
    if not summary["subject"].startswith("ours-shm"):
        raise ValueError(f"{result.path}: the first of our sides is {summary['subject']}, not one over shared memory")
    return Cell(sides[summary["subject"]]["num_parameters"], low, median, high, label(summary["best"]))


def read_rows() -> dict[str, list[Cell]]:
    """Return for each kind its cells, smallest model first."""
    rows: dict[str, list[Cell]] = {}
    for kind, results in read_results([HERE / "results"]).items():
        if kind in KINDS:
            cells = [cell_of(results[case], first_sides(results[case].path, case)) for case in CASES]
            rows[kind] = sorted(cells, key=lambda cell: cell.num_parameters)
    return {kind: rows[kind] for kind in KINDS}


def first_sides(path: Path, case: str) -> dict[str, dict[str, int]]:
    """Return what the sides of a case said of themselves."""
    return json.loads(path.read_text())["results"][case]["starts"][0]["sides"]


def millions(count: int) -> str:
    return f"{count / 1e6:.1f}M"


def table(rows: dict[str, list[Cell]]) -> str:
    """Return the table in Markdown."""
    sizes = [millions(cell.num_parameters) for cell in next(iter(rows.values()))]
    lines = [
        f"| step time / fastest other, lower is better | {' | '.join(f'{size} GPT' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for kind, cells in rows.items():
        plan, words = KINDS[kind]
        figures = " | ".join(f"{cell.median:.2f} ({cell.low:.2f} to {cell.high:.2f})" for cell in cells)
        lines.append(f"| `{plan}`, {words} | {figures} |")
    return "\n".join(lines)


def across(ratio: float) -> float:
    """Return where a ratio lies from the left [px]."""
    return LEFT + ratio / FULL * (WIDTH - LEFT - RIGHT)


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", fill: str = "#24292f") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )


def picture(rows: dict[str, list[Cell]]) -> str:
    """Return the picture: for each plan a dot a model, with the quartiles, and the fastest other library as a line at 1."""
    bottom = TOP + ROW * len(rows)
    height = bottom + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>Step time of Meshwright over the fastest other library's, five plans, three models</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        text(16, 26, "Step time / the fastest other library's: left of the line is faster", 15),
    ]
    for index, cell in enumerate(next(iter(rows.values()))):
        x = across(0) + 96 * index
        parts += [
            f'<circle cx="{x + 6:.1f}" cy="44" r="6" fill="{COLOURS[index]}"/>',
            text(x + 17, 48.5, millions(cell.num_parameters) + (" parameters" if index == 2 else ""), 12),
        ]
    for tick in range(0, round(FULL * 10) + 1, 2):
        x = across(tick / 10)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#e6e8eb"/>')
        parts.append(text(x, bottom + 17, f"{tick / 10:.1f}", 12, "middle"))
    one = across(1)
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{TOP}" y2="{bottom}" stroke="#cf222e" stroke-width="1.5"/>')
    parts.append(text(one, bottom + 34, "fastest other library", 12, "middle", "#cf222e"))
    for row, (kind, cells) in enumerate(rows.items()):
        plan, words = KINDS[kind]
        middle = TOP + ROW * (row + 0.5)
        parts += [text(16, middle - 2, plan, 14), text(16, middle + 14, words, 11, fill="#57606a")]
        for index, cell in enumerate(cells):
            y = middle + 13 * (index - 1)
            parts += [
                f'<line x1="{across(cell.low):.1f}" x2="{across(cell.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{COLOURS[index]}" stroke-width="2.5"/>',
                f'<circle cx="{across(cell.median):.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[index]}">'
                f"<title>{cell.median:.3f} [{cell.low:.3f}, {cell.high:.3f}] of {escape(cell.best)}</title></circle>",
            ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    only_compares = parser.parse_args().check
    rows = read_rows()
    readme = README.read_text()
    if len(MARKED.findall(readme)) != 1:
        sys.exit(
            f"{README} has not exactly one place for the table, between the marks that {Path(__file__).name} names"
        )
    wanted = {PICTURE: picture(rows), README: MARKED.sub(lambda _: table(rows), readme)}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    if only_compares:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the results give: run python benchmarks/peers/figure.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
