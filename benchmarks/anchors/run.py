"""Silent bugs of others, put into this library while it runs: which key finds each?

    python benchmarks/anchors/run.py --out benchmarks/anchors/results/anchors.json
    python benchmarks/anchors/run.py --only clip

A plan is run four times: without the mutation, for reference; with it and without sentinels (does it do harm, or does an error, a
guard, a type or the proof keep it from that?); with sentinels; and under `verify`. Exit status 1 where one does harm and nothing
finds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jobs  # noqa: E402
from catalogue import CATALOGUE  # noqa: E402

from meshwright import testing  # noqa: E402
from meshwright.spec import Plan  # noqa: E402
from surroundings import environment  # noqa: E402

HARM = 1e-9
"""Differences above this are harm [relative]: float64, six steps."""


def harm(found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    """Return the largest difference of a value, a loss or a norm on any rank, relative to the largest of its tensor."""
    worst = 0.0
    for mine, right in zip(found, reference, strict=True):
        for kind in ("losses", "norms"):
            worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(mine[kind], right[kind], strict=True)))
        for name, value in right["values"].items():
            largest = max(value.abs().max().item(), 1e-300)
            worst = max(worst, (mine["values"][name] - value).abs().max().item() / largest)
    return worst


def examine(index: int) -> dict[str, Any]:
    """Run one mutation in all four ways; return which key finds it."""
    mutation = CATALOGUE[index]
    num_ranks = Plan.parse(mutation.plan).num_ranks
    reference = testing.run_ranks(jobs.train, num_ranks, index, 0, False)
    without = testing.run_ranks(jobs.train, num_ranks, index, 0, True)
    found: dict[str, Any] = {"mutation": mutation.name, "title": mutation.title, "anchor": mutation.anchor}
    found |= {"plan": mutation.plan, "harm": None, "sentinel": "", "verify": "", "key": ""}
    if without[0]["error"]:
        return found | {"key": "error", "text": f"{without[0]['error']}: {without[0]['text']}"}
    found["harm"] = harm(without, reference)
    watched = testing.run_ranks(jobs.train, num_ranks, index, jobs.EVERY, True)
    if watched[0]["error"]:
        found["sentinel"] = f"step {len(watched[0]['losses'])}: {watched[0]['text']}"
    verdict = testing.run_ranks(jobs.verify, num_ranks, index)[0]
    found["verify"] = "" if verdict["equal"] else f"not equal: {verdict['text']}"
    is_whole = without[0]["layouts"] != reference[0]["layouts"]
    draws = "dropout" in mutation.model  # another layout draws other numbers: `verify` alone tells of harm then
    if (found["harm"] <= HARM or (draws and is_whole and not found["verify"])) and not found["sentinel"]:
        new = [reason for reason in without[0]["reasons"] if reason not in reference[0]["reasons"]]
        by_type = next((reason for reason in new if "types: " in reason), "")
        told = by_type or next((reason for reason in new if reason.startswith("whole")), "")
        return found | {"key": ("type" if by_type else "proof") if is_whole else "no harm", "text": told}
    return found | {"key": "sentinel" if found["sentinel"] else "verify" if found["verify"] else "NOTHING"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose name has this in it")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    arguments = parser.parse_args()
    results = []
    for index, mutation in enumerate(CATALOGUE):
        if arguments.only in mutation.name:
            try:
                found = examine(index)
            except Exception as error:
                found = {"mutation": mutation.name, "title": mutation.title, "anchor": mutation.anchor}
                found |= {
                    "plan": mutation.plan,
                    "harm": None,
                    "key": "hang",
                    "text": f"{type(error).__name__}: {error}"[:300],
                }
            results.append(found)
            size = "" if found["harm"] is None else f"{found['harm']:.0e}"
            told = found.get("text") or found["sentinel"] or found["verify"]
            print(f"{mutation.plan:26} {mutation.title:52} {size:>6} {found['key']:9} {told[:110]}", flush=True)
    testing.close_pools()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    missed = [found for found in results if found["key"] == "NOTHING"]
    print(f"{len(results)} mutations, {len(missed)} do harm and are found by nothing")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
