"""Whether offered plans run: the best plans for small models of many kinds, each trained for two steps beside one plain process.

    python benchmarks/planner/offers.py --out benchmarks/planner/results/offers.json

Each model is described, planned for on 2 and on 4 ranks of a CPU, and trained under each of the best five plans, in float64 with
plain SGD. Four made clusters bring out other plans: much memory or little, slow links or fast ones. A plan's verdict is

equal    loss, parameters and buffers of both steps are those of the plain process (BatchNorm: in the same pieces)
WRONG    they are not
refused  every rank raised an error with a fix: it should not have been offered
crashed  anything else
idle     equal, but nothing was cut that the plan says is cut: tensor parallelism without a layout

Exit status 1 where a plan is anything but equal.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "examples"), str(HERE.parent)]

from benchmarks.planner.offered_models import MODELS  # noqa: E402
from tests.parity.harness import pieces_of  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright import testing  # noqa: E402
from meshwright.errors import MeshwrightError, PlanError  # noqa: E402
from surroundings import environment  # noqa: E402

SAMPLES = 12
STEPS = 2
BOUND = 1e-9
SMALL = 1e-3
"""Entries below it: the bias of keys changes no result of attention, and what trains it is rounding alone."""
RANKS = (2, 4)
TRAIN = mw.TrainSpec(global_batch_size=SAMPLES, optimizer="sgd")

# One rank's share of a CPU. Memory is a share of what the plan that needs the least takes at its peak; None is enough for all.
CLUSTERS: dict[str, tuple[float | None, float]] = {
    "much memory, slow links": (None, 1e8),
    "much memory, fast links": (None, 1e12),
    "little memory, slow links": (1.15, 1e8),
    "some memory, fast links": (2.5, 1e12),
    "little memory, fast links": (1.6, 1e12),
}


def cluster_of(ranks: int, memory_bytes: int, link_bytes_per_s: float) -> mw.ClusterSpec:
    """Return a made host whose ranks have so much memory each."""
    device = mw.DeviceSpec(
        name="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1e10,
        peak_flops_per_s={"fp32": 5e10, "bf16": 5e10},
        sources={"memory_bytes": "made up"},
    )
    link = mw.LinkSpec(name="made-up", bytes_per_s=link_bytes_per_s, latency_s=0.0)
    return mw.ClusterSpec(name=f"{ranks}-ranks", device=device, devices_per_host=ranks, link=link)


def offers(spec: mw.ModelSpec, ranks: int, top: int) -> dict[mw.Plan, str]:
    """Return the best plans on each of the clusters, with the first cluster that offers each."""
    found: dict[mw.Plan, str] = {}
    everything = mw.make_plans(spec, cluster_of(ranks, 1 << 40, 1e9), TRAIN, top=100_000)
    least = min(plan.prediction.peak_bytes for plan in everything if plan.prediction is not None)
    for name, (share, link) in CLUSTERS.items():
        memory = 1 << 40 if share is None else int(least * share / 0.92) + 1
        try:
            plans = mw.make_plans(spec, cluster_of(ranks, memory, link), TRAIN, top=top)
        except PlanError:
            continue
        for plan in plans:
            found.setdefault(plan, name)
    return found


@dataclasses.dataclass
class Seen:
    """What a training left on one rank."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    num_cut: int
    """Parameters that tensor parallelism cut [count]."""
    reasons: list[str]


def train(name: str, plan_text: str) -> Seen:
    """Train under a plan; every rank calls this."""
    case = MODELS[name].case
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(case.build, plan_text, loss_fn=case.loss_fn, optimizer=sgd, seed=0) as model:
        batches = case.batches(SAMPLES, STEPS)
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches]
        cut = [kind for kind in model.plan.layouts.values() if kind != "whole"]
        return Seen(losses, model.full_state_dict(), len(cut), list(model.plan.reasons))


@functools.lru_cache(maxsize=64)
def reference(name: str, dp: int, micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and state of the plain process; of a model that depends on the pieces, in those of a plan."""
    offered = MODELS[name]
    shares = None
    if offered.in_pieces:

        def shares(batch: Any) -> Any:
            return pieces_of(batch, SAMPLES, dp, micro_batches)

    records = testing.oracle_steps(
        offered.case.build, offered.case.batches(SAMPLES, STEPS), offered.case.loss_fn, seed=0, shares=shares
    )
    return [record.loss for record in records], records[-1].parameters | records[-1].buffers


def difference(seen: Seen, expected: tuple[list[float], dict[str, torch.Tensor]]) -> float:
    """Return the largest difference of a loss or a tensor, relative to its largest entry, or to `SMALL` where that is less."""
    losses, state = expected
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(seen.losses, losses, strict=True))
    for key, right in state.items():
        if key in seen.state and right.numel():
            scale = max(right.double().abs().max().item(), SMALL)
            worst = max(worst, (seen.state[key].double() - right.double()).abs().max().item() / scale)
    return worst


def run_plan(name: str, plan: mw.Plan) -> dict[str, Any]:
    """Train under a plan and beside it; return the verdict."""
    try:
        outcomes = testing.run_outcomes(train, plan.num_ranks, name, str(plan))
    except MeshwrightError as error:  # a rank died, or they did not come out
        return {"verdict": "crashed", "text": str(error)[:600]}
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        is_refused = len(errors) == len(outcomes) and all(getattr(error, "fix", None) for error in errors)
        return {"verdict": "refused" if is_refused else "crashed", "text": f"{type(errors[0]).__name__}: {errors[0]}"}
    is_cut = MODELS[name].in_pieces
    expected = reference(name, plan.dp if is_cut else 1, plan.micro_batches if is_cut else 1)
    worst = max(difference(outcome.result, expected) for outcome in outcomes)
    if worst > BOUND:
        return {"verdict": "WRONG", "largest": worst, "text": "; ".join(outcomes[0].result.reasons)}
    if plan.tp > 1 and not any(outcome.result.num_cut for outcome in outcomes):
        return {"verdict": "idle", "largest": worst, "text": "; ".join(outcomes[0].result.reasons)}
    return {"verdict": "equal", "largest": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--ranks", type=int, default=None, help="2 or 4")
    parser.add_argument("--top", type=int, default=5, help="plans of each cluster")
    parser.add_argument("--list", action="store_true", help="show the offers, and run none")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = []
    for name in (name for name in MODELS if arguments.only in name):
        case = MODELS[name].case
        spec = mw.describe_model(case.build, case.batch(SAMPLES, 0), loss_fn=case.loss_fn)
        for ranks in RANKS if arguments.ranks is None else (arguments.ranks,):
            for plan, cluster in offers(spec, ranks, arguments.top).items():
                row = {"model": name, "ranks": ranks, "cluster": cluster, "plan": str(plan)}
                if not arguments.list:
                    row |= run_plan(name, plan)
                cells.append(row)
                text = str(row.get("text", "")).replace("\n", " ")[:160]
                print(f"{name:24s} {plan!s:64s} {row.get('verdict', ''):8s} {text}", flush=True)
    counts = collections.Counter(row.get("verdict", "listed") for row in cells)
    print(dict(counts))
    if arguments.out is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "environment": environment(),
            "counts": counts,
            "cells": cells,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if set(counts) <= {"equal", "listed"} else 1


if __name__ == "__main__":
    sys.exit(main())
