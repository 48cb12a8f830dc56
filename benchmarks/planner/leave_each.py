"""Leave one source out: constants fitted to all others, and the error on that one.

    python -m benchmarks.planner.leave_each published.json --out benchmarks/planner/results/leave_each.json

Constants are fitted to all sources first, from what is expected of them or from ``--start``. How much each row changes with each
constant there is a straight model, in which the weight of one source at a time is nothing, and constants that suit the others are
found anew. The error on it is that of the costs themselves. This takes a minute in place of one for each source. A device that no
other source has goes back to the share that it is expected to have.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.planner import errors
from benchmarks.planner.fit import Fit


def each_left_out(fit: Fit, groups: list[str]) -> dict[str, Any]:
    """Return the errors on the rows of each source, under constants in which its rows count nothing."""
    now, fitted, table = fit.distances(None), dict(fit.logs), {}
    slopes = fit.slopes(now, None)
    for group in groups:
        fit.move(fit.left_out(slopes, now, group))
        cases = fit.groups[group]
        ratios = {id(case.row): ratio for case, ratio in zip(cases, fit.ratios(group), strict=True)}
        rows = [case.row for case in cases]
        table |= errors.errors_of(rows, lambda row, ratios=ratios: ratios[id(row)] * row["measured"]["step_time_s"])
        fit.move(fitted)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the fit may take; 0 with --start: none")
    parser.add_argument("--most", type=int, default=60, help="rows of one source that are used, drawn at random")
    parser.add_argument("--groups", nargs="*", help="sources to leave out; None means each")
    parser.add_argument("--start", type=Path, help="what `fit.py` wrote, where its constants are those to start from")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    random.seed(0)
    fit = Fit(errors.read(options.rows), most=options.most)
    if options.start is not None:
        fit.start(options.start)
    if options.seconds:
        fit.descend(options.seconds, without=None)
    table = each_left_out(fit, options.groups or sorted(fit.groups))
    print(errors.show(table))
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
