"""Leave one source out: constants fitted to all others, from what is expected of them, and the error on that one.

    python -m benchmarks.planner.leave_each published.json --out benchmarks/planner/results/leave_each.json

A fit takes a minute or two. A device that no other source has keeps the share that it is expected to have.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.planner import errors
from benchmarks.planner.fit import Fit


def fit_without(paths: list[Path], group: str, seconds: float, most: int) -> dict[str, Any]:
    """Return the errors on the rows of a source, whose rows no constant has seen."""
    random.seed(0)
    fit = Fit(errors.read(paths), most=most)
    fit.descend(seconds, without=group)
    cases = fit.groups[group]
    ratios = {id(case.row): ratio for case, ratio in zip(cases, fit.ratios(group), strict=True)}
    rows = [case.row for case in cases]
    return errors.errors_of(rows, lambda row: ratios[id(row)] * row["measured"]["step_time_s"])[group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long a fit may take")
    parser.add_argument("--most", type=int, default=120, help="rows of one source that are used, drawn at random")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--groups", nargs="*", help="sources to leave out; None means each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups = options.groups or sorted(errors.by_group(errors.read(options.rows)))
    with concurrent.futures.ProcessPoolExecutor(options.workers) as pool:
        futures = [pool.submit(fit_without, options.rows, group, options.seconds, options.most) for group in groups]
        table = {group: future.result() for group, future in zip(groups, futures, strict=True)}
    print(errors.show(table))
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
