"""The sweep: every architecture under every plan, one line of JSON for each cell, to be continued at any time.

python -m benchmarks.any_model.run --plans "zero3;tp2;pp2" --out benchmarks/any_model/results/cells.jsonl
python -m benchmarks.any_model.table benchmarks/any_model/results/cells.jsonl

Cells run one after the other on ranks of a pool; ranks that hang or die are replaced, and so is this process where it dies.
With `--lane 100` one process runs the cells that it can end in so many seconds: for a machine that lends its cores in turns.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.any_model import float64

float64.install()

import torch  # noqa: E402
from benchmarks.any_model import cell, finder, recipes  # noqa: E402
from benchmarks.error_rows import without_folders  # noqa: E402

from meshwright import testing  # noqa: E402
from meshwright.spec import Plan  # noqa: E402
from meshwright.testing import pool  # noqa: E402

HERE = Path(__file__).resolve().parent
PLANS = {
    "dp2": ["dp=2"],
    "zero1": ["dp=2,zero=1"],
    "zero2": ["dp=2,zero=2"],
    "zero3": ["dp=2,zero=3,whole_below=0"],
    "tp2": ["tp=2"],
    "tp4": ["tp=4"],
    "pp2": [f"pp=2,micro_batches=2,schedule={kind}" for kind in ("1f1b", "gpipe", "zb-h1")]
    + ["pp=2,micro_batches=2,schedule=interleaved,virtual=2", "pp=2,micro_batches=2,schedule=zbv,virtual=2"],
    "pp3": [f"pp=3,micro_batches=3,schedule={kind}" for kind in ("1f1b", "zb-h1", "gpipe")],
    "dp2_tp2": ["dp=2,tp=2"],
    "dp2_tp2_zero3": ["dp=2,tp=2,zero=3,whole_below=0"],
    "dp2_pp2": ["dp=2,pp=2,micro_batches=2"],
    "tp2_pp2": ["tp=2,pp=2,micro_batches=2"],
}
PLANS |= {f"{name}_whole": [f"{PLANS[name][0]},batch=whole"] for name in ("dp2", "zero1", "zero2", "zero3")}
"""The last ones are the fix of what is refused under the first: each rank takes the whole batch."""
BOUND = 1e-8
LEAST = 2
"""Samples of a part of a batch, for models that take no single one [count]."""
LEAST_MIXED = 8
"""The like where samples are normalised together: of two values a channel nothing but their order is left, and a gradient is
rounding alone [count]."""


_STARTED = time.monotonic()
_LEAST_S = 12.0
"""Of a lane: with less left no cell is begun [s]."""


class _LateError(TimeoutError):
    pass


def _late(*_: Any) -> None:
    raise _LateError


_SHARED = ("draws", "first_step_s", "first_step_cpu_s", "search_cpu_s", "reasons")
"""What a row takes from the first rank."""


def judge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict of a cell from what its ranks report."""
    errors = [rank["error"] for rank in ranks if rank["error"] is not None]
    first = ranks[0]
    shared = {name: first[name] for name in _SHARED if name in first}
    if "blocks" in first:  # each stage of a pipeline knows what is cut of its own layers
        for kind in ("cut", "stored"):
            names = {name for rank in ranks for name in rank.get(kind, ())}
            total = max(1, sum(first["blocks"].values()))
            shared[f"{kind}_of_blocks"] = round(sum(map(first["blocks"].get, names)) / total, 4)
    if "reasons" in shared:
        shared["reasons"] = list(map(without_folders, shared["reasons"]))
    if errors:
        is_refused = len(errors) == len(ranks) and all(e["is_ours"] and e["fix"] for e in errors)
        kind = "refused" if is_refused else "hung" if any(e["type"] == "LostPeerError" for e in errors) else "crashed"
        if any(e["exit_code"] == 15 for e in errors):
            kind = "caught"
        error = next((e for e in errors if e["type"] not in ("LostPeerError",)), errors[0])
        text = without_folders(f"{error['type']}: {error['message']}")
        trace = next((rank["traceback"] for rank in ranks if rank["error"] is error), "")
        return {"verdict": kind, "text": text[:900], "fix": error["fix"], "traceback": trace, **shared}
    worst = max(rank["largest"] for rank in ranks)
    where = max(ranks, key=lambda rank: rank["largest"])["where"]
    is_equal = worst <= BOUND and len({rank["digest"] for rank in ranks}) == 1
    text = "" if is_equal else (where if worst > BOUND else "ranks differ by a bit")
    is_told = any(reason.startswith("rng: ") for reason in shared.get("reasons", ()))
    kind = "equal" if is_equal else "told" if is_told else "wrong"
    return {"verdict": kind, "largest": worst, "text": text, **shared}


def run_cell(recipe: dict[str, Any], name: str, line: str, limit_s: float, directory: Path) -> dict[str, Any]:
    """Run one cell and return its row."""
    plan = Plan.parse(line)
    row = {"type": recipe["type"], "kind": recipe["kind"], "class": recipe["class"], "plan": name, "line": line}
    row["dropout"] = recipes.rate_of(recipe)
    begin = time.perf_counter()
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        shares = (plan.num_shares, plan.micro_batches) if recipe.get("mixes") else (1, 1)
        # A norm of one value a channel raises in plain torch as well: each part has two samples or more then.
        recipe = _with_outputs(recipe)
        least = (LEAST_MIXED if recipe.get("mixes") else LEAST) * plan.num_shares * plan.micro_batches + 1
        if least > recipes.SAMPLES and (recipe.get("mixes") or not _takes_one(json.dumps(recipe))):
            recipe = {**recipe, "samples": least}
        reference = _reference(recipe, shares, directory)
        outcomes = testing.run_outcomes(cell.train_under_plan, plan.num_ranks, recipe, line, str(reference))
        broken = next((outcome for outcome in outcomes if outcome.error is not None), None)
        if broken is not None:
            verdict = {
                "verdict": "crashed",
                "text": without_folders(str(broken.error))[:900],
                "traceback": without_folders(broken.traceback_text)[-2500:],
            }
        else:
            results = [outcome.result for outcome in outcomes]
            verdict = judge(results)
            are_alike = len({result.get("digest") for result in results}) == 1
            if verdict["verdict"] == "wrong" and recipe.get("mixes") and are_alike:
                # BatchNorm enlarges rounding: a reader sees beside it what another order of samples changes.
                verdict["rounding"] = cell.rounding_of(recipe, *shares)
    except _LateError:
        verdict = {"verdict": "hung", "text": f"no answer within {limit_s:g} s"}
    except Exception as error:
        kind = "hung" if type(error).__name__ == "LostPeerError" else "crashed"
        verdict = {"verdict": kind, "text": f"{type(error).__name__}: {error}"[:900]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if verdict["verdict"] == "hung" and plan.num_ranks in pool._POOL._groups:
        pool._POOL.drop(plan.num_ranks)
    return {**row, **verdict, "seconds": round(time.perf_counter() - begin, 2)}


@functools.cache
def _outputs_of(text: str) -> list[str]:
    recipe = json.loads(text)
    torch.manual_seed(0)
    return recipes.paths_of_samples(cell.Build(recipe)(), recipe)


@functools.cache
def _takes_one(text: str) -> bool:
    """Tell whether a model trains on one sample in plain torch."""
    recipe = json.loads(text)
    torch.manual_seed(0)
    try:
        cell.train_plainly({**recipe, "samples": 1})
    except ValueError:
        return False
    return True


def _with_outputs(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe that names the outputs of samples: another tensor may have as many entries as a part of a batch."""
    return recipe if recipe["loss"] != "outputs" else {**recipe, "outputs": _outputs_of(json.dumps(recipe))}


def _reference(recipe: dict[str, Any], shares: tuple[int, int], directory: Path) -> Path:
    stem = recipe["type"].replace("/", ".")
    path = directory / f"{stem}_{shares[0]}_{shares[1]}_{recipes.samples_of(recipe)}.pt"
    if not path.exists():
        for old in directory.glob("*.pt"):
            if not old.name.startswith(f"{stem}_"):
                old.unlink()
        torch.save(cell.train_plainly(recipe, *shares), path)
    return path


def work(arguments: argparse.Namespace) -> None:
    """Run the cells that have no row yet, in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("PYTHONHASHSEED", "0")  # as `meshwright launch` starts ranks; those of a pool of tests differ
    finder.prepare()
    signal.signal(signal.SIGALRM, _late)
    pool.preload("benchmarks.any_model.cell", "transformers", "transformers.modeling_utils", "torch._dynamo")
    pool._TIMEOUT_S = arguments.limit
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="any_model_") as directory:
        for place, (recipe, name, line) in enumerate(pending(arguments)):
            limit_s = min(arguments.limit, _STARTED + arguments.lane - time.monotonic())
            if time.monotonic() > end or (place and limit_s < _LEAST_S):
                return
            arguments.current.write_text(json.dumps([recipe["type"], recipe["kind"], recipe["class"], name, line]))
            row = run_cell(recipe, name, line, limit_s, Path(directory))
            is_cut_short = place > 0 and limit_s < arguments.limit and row["verdict"] == "hung"
            if not is_cut_short:  # else the next process begins with it
                write(arguments.out, row)
            arguments.current.unlink()
            if is_cut_short:
                return


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a row, and show it."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    cut = f" cut {row['cut_of_blocks']:.2f}" if "cut_of_blocks" in row else ""
    print(
        f"{row['verdict']:8s} {row['type']:28s} {row['line']:44s} {row['seconds']:6.1f} s{cut} {row['text'][:150]}",
        flush=True,
    )


def pending(arguments: argparse.Namespace) -> list[tuple[dict[str, Any], str, str]]:
    """Return the cells without a row, all plans of an architecture after one another."""
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    again = set(filter(None, arguments.again.split(",")))
    latest = {(row["type"], row["plan"]): row["verdict"] for row in rows}
    done = {key for key, verdict in latest.items() if verdict not in again}
    found = []
    all_recipes = [json.loads(line) for line in arguments.recipes.read_text().splitlines()]
    valid = [{**recipe, "dropout": arguments.dropout} for recipe in all_recipes if "problem" not in recipe]
    # Drawn order: a sweep that is stopped has seen architectures of all kinds.
    drawn = sorted(enumerate(valid), key=lambda item: _drawn(arguments.seed + item[1]["type"]))
    for index, recipe in drawn:
        if not re.fullmatch(arguments.only, recipe["type"]) or index % arguments.every:
            continue
        for name in re.split(r"[;,]", arguments.plans):
            if (recipe["type"], name) not in done:
                found.append((recipe, name, PLANS[name][index % len(PLANS[name])]))
    return found


def _drawn(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def note_death(arguments: argparse.Namespace, code: int | str) -> bool:
    """Write the row of the cell in which a process has died, if one has; tell whether one had."""
    if not arguments.current.exists():
        return False
    kind, family, cls, name, line = json.loads(arguments.current.read_text())
    arguments.current.unlink()
    text = f"the sweep's own process ended with {code}"
    row = {"type": kind, "kind": family, "class": cls, "plan": name, "line": line, "seconds": 0.0}
    write(arguments.out, {**row, "verdict": "crashed", "text": text})
    return True


def supervise(arguments: argparse.Namespace) -> int:
    """Run workers until no cell is left; one that dies leaves a row for the cell that it was in."""
    end = time.monotonic() + 60 * arguments.minutes
    while pending(arguments) and time.monotonic() < end:
        minutes = (end - time.monotonic()) / 60
        command = [
            sys.executable,
            "-m",
            "benchmarks.any_model.run",
            "--worker",
            *sys.argv[1:],
            "--minutes",
            str(minutes),
        ]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run() ends the worker then, which ends its ranks
        code = subprocess.run(command, check=False).returncode
        if not note_death(arguments, code) and code:
            return code
        if arguments.again:
            break
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plans",
        default=";".join(name for name in PLANS if not name.endswith("_whole")),
        help=f"of {', '.join(PLANS)}",
    )
    parser.add_argument("--only", default=".*", help="regular expression of architectures")
    parser.add_argument("--every", type=int, default=1, help="take every n-th architecture")
    parser.add_argument("--again", default="", help="verdicts whose cells run again, once")
    parser.add_argument("--dropout", type=float, default=0.0, help="rate of all dropouts [fraction]")
    parser.add_argument("--limit", type=float, default=120.0, help="time for a cell [s]")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--lane", type=float, default=math.inf, help="time for this process, its start included [s]")
    parser.add_argument("--seed", default="", help="text that draws another order of architectures")
    parser.add_argument("--recipes", type=Path, default=HERE / "recipes.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.current = arguments.out.with_suffix(".current")
    if arguments.lane < math.inf:
        note_death(arguments, "nothing said: it died, or its turn was over")
    if arguments.worker or arguments.lane < math.inf:
        work(arguments)
        return 0
    return supervise(arguments)


if __name__ == "__main__":
    sys.exit(main())
