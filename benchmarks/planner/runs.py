"""Predictions of this machine's runs: every kind of plan for four models, predicted before and measured.

    python -m benchmarks.planner.runs --out benchmarks/planner/results/runs.json

`--models gpt_python` measures one model anew, and leaves what `--out` has of the others: each takes some two minutes. `--plans
"tp=2; dp=2"` does the same for plans.
The machine is measured anew before each model, since its speed drifts within minutes, and what an earlier day kept is not used.
With `--machine FOLDER` it is measured once and kept there, so that all models are predicted by the same numbers; `--keep` uses
what is kept.

"auto" is the plan that `train` would choose on two devices; the others are every kind. Plans that cannot be applied to a model
are listed with their refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.surroundings import environment as surroundings

import meshwright as mw
from meshwright.compare.run_plans import compare_plans, run_trials
from meshwright.errors import MeshwrightError
from meshwright.host import CACHE_VARIABLE
from meshwright.train.config.load import load_config

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
MODELS: Final = ("gpt_python", "resnet_digits", "lstm_python", "gpt_hf")
_ROUNDS: Final = 11
"""Of a duel: on a shared machine medians of five differ by 15 % from one time to the next [count]."""
PLANS: Final[tuple[str, ...]] = (
    "auto",
    "single",
    "data_parallel",
    "model_parallel",
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "pp=2,schedule=gpipe,micro_batches=4",
    "pp=2,micro_batches=4",
    "pp=2,schedule=interleaved,virtual=2,micro_batches=4",
    "pp=2,schedule=zb-h1,micro_batches=4",
    "pp=2,schedule=zbv,micro_batches=4",
    "dp=2,micro_batches=2,recompute=full",
    "dp=2,compress=int8",
)


def run_model(name: str, plans: list[str], steps: int) -> list[dict[str, Any]]:
    """Return a row for each plan: predicted and measured step, peak and sent bytes, or why it failed."""
    comparison = compare_plans(EXAMPLES / f"{name}.toml", plans, steps=steps)
    rows: list[dict[str, Any]] = []
    for row in comparison.rows:
        trial, prediction = row.trial, row.trial.prediction
        found: dict[str, Any] = {"model": name, "plan": trial.name, "line": trial.plan, "error": trial.error}
        if trial.error is None:
            found |= {
                "measured": {"step_s": row.step_s, "peak_bytes": row.peak_memory_bytes, "sent_bytes": row.sent_bytes},
                "predicted": prediction.to_dict() if prediction is not None else None,
                "step_ratio": row.step_prediction_ratio,
                "memory_ratio": row.memory_prediction_ratio,
                "sent_ratio": row.sent_prediction_ratio,
                "other_cores": trial.other_cores,
                "pace": trial.pace,
                "step_ratio_at_pace": (row.step_prediction_ratio or 0.0) * (trial.pace or 1.0) or None,
                "is_baseline": trial.is_baseline,
            }
        rows.append(found)
    return rows


def run_plans(name: str, steps: int, plans: Sequence[str] = PLANS) -> list[dict[str, Any]]:
    """Return the rows of plans; one that is refused before anything has started is left out, with its refusal."""
    plans, refused = list(plans), []
    while True:
        try:
            return [*run_model(name, plans, steps), *refused]
        except MeshwrightError as error:
            bad = next((plan for plan in plans if f"'{plan}'" in error.message), None)
            if bad is None:
                raise
            plans.remove(bad)
            refused.append({"model": name, "plan": bad, "error": error.message})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return errors |predicted / measured - 1| over all runs, and how far the chosen plan is from the fastest of each model."""

    def errors(key: str) -> list[float]:
        return [abs(1 / row[key] - 1) for row in rows if row.get(key)]

    found: dict[str, Any] = {"runs": sum(row["error"] is None for row in rows)}
    for key in ("step_ratio", "step_ratio_at_pace", "memory_ratio", "sent_ratio"):
        numbers = errors(key)
        if numbers:
            found[key] = {
                "median_error": statistics.median(numbers),
                "p90_error": statistics.quantiles(numbers, n=10)[-1] if len(numbers) > 1 else numbers[0],
                "worst": max(numbers),
            }
    return found


def duels(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the plan that "auto" chose is behind the two that were the fastest beside it, measured in turns."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name and row["error"] is None and not row["is_baseline"]]
        chosen = next(row["line"] for row in of_model if row["plan"] == "auto")
        others = sorted((row for row in of_model if row["line"] != chosen), key=lambda row: row["measured"]["step_s"])
        rivals = list(dict.fromkeys(row["line"] for row in others))[:2]
        config, rounds = load_config(EXAMPLES / f"{name}.toml"), []
        contenders = [chosen, *rivals]
        # Each stands first, second and last as often: what is run first finds the machine as the last one left it.
        orders = [[(place + turn) % len(contenders) for place in range(len(contenders))] for turn in range(_ROUNDS)]
        lines = [contenders[place] for order in orders for place in order]
        times = [
            statistics.median(t.step_seconds) for t in run_trials(config, list(map(mw.Plan.parse, lines)), 15, None)
        ]
        for first, order in zip(range(0, len(times), len(contenders)), orders, strict=True):
            by_place = dict(zip(order, times[first : first + len(contenders)], strict=True))
            rounds.append([by_place[place] for place in range(len(contenders))])
        behind = {
            rival: statistics.median(one[0] / one[place] for one in rounds) - 1 for place, rival in enumerate(rivals, 1)
        }
        found[name] = {"chosen": chosen, "behind": behind, "rounds_s": rounds}
        print(
            f"{name:15}{chosen:30}" + "".join(f"{rival}: {100 * by:+.1f} %  " for rival, by in behind.items()),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--plans", help='plans with ";" between them, measured anew; the choice is left as it was')
    parser.add_argument("--duels-of", type=Path, help="what an earlier run wrote: only the choice is measured again")
    parser.add_argument("--keep", action="store_true", help="use what is kept of this machine")
    parser.add_argument(
        "--machine", type=Path, help="a folder that keeps what is measured of this machine for this file alone"
    )
    options = parser.parse_args()
    if options.duels_of is not None:
        result = json.loads(options.duels_of.read_text(encoding="utf-8"))
        result["chosen"] = duels(result["rows"])
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    plans: list[str] = [plan.strip() for plan in options.plans.split(";")] if options.plans else list(PLANS)
    rows, chosen = _of_others(options.out, options.models, plans if options.plans else None)
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        if options.machine and not options.keep:
            _use_anew(options.machine)
        for name in options.models:
            if not (options.machine or options.keep):
                _use_anew(Path(folder) / name)
            found = run_plans(name, options.steps, plans)
            rows += found
            for row in found:
                ratios = [row.get(key) for key in ("step_ratio", "step_ratio_at_pace", "memory_ratio", "sent_ratio")]
                told = row["error"] or "  ".join("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
                print(f"{row['model']:15}{row['plan']:55}{told[:110]}", flush=True)
        if not options.plans:
            chosen |= duels([row for row in rows if row["model"] in options.models])
    result = {
        "chosen": chosen,
        "surroundings": surroundings(),
        "seconds": time.time() - began,
        "summary": summary(rows),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    json.dump(result["summary"], sys.stdout, indent=1)
    print()


def _of_others(path: Path, models: list[str], plans: list[str] | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows and choices that an earlier run wrote: of other models, and of other plans where some are named."""
    if not path.exists():
        return [], {}
    earlier = json.loads(path.read_text(encoding="utf-8"))
    is_anew = [
        row["model"] in models and (plans is None or row["plan"] in plans or row.get("is_baseline"))
        for row in earlier["rows"]
    ]
    rows = [row for row, anew in zip(earlier["rows"], is_anew, strict=True) if not anew]
    return rows, {name: found for name, found in earlier["chosen"].items() if plans is not None or name not in models}


def _use_anew(folder: Path) -> None:
    """Keep what is measured in a new folder, with the compiled extensions of the usual one: no link to one is followed."""
    from meshwright.comm.shm.build import build_extension

    usual = build_extension().parent
    folder.mkdir(mode=0o700, exist_ok=True)
    for built in usual.glob("_meshwright_*.so"):
        shutil.copy(built, folder)
    os.environ[CACHE_VARIABLE] = str(folder)


if __name__ == "__main__":
    main()
