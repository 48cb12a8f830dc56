"""Steps of one GPU as the planner predicts them, from the data sheet and from a probe, beside measured ones.

python -m benchmarks.gpu.predict --preset 1xh100-sxm --out benchmarks/gpu/results/predicted.json

Without a GPU, steps that were measured before are predicted again, from the data sheet and from the probe of that time:

python -m benchmarks.gpu.predict --preset 1xh200-sxm --again benchmarks/gpu/results/predicted.json \\
    --cluster benchmarks/gpu/results/h200.cluster.json --out benchmarks/gpu/results/predicted_autocast.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.gpu.gpt import GPT, SIZES, Size, batch_of, loss_fn
from benchmarks.gpu.overhead import device_of_this, wait_for_gpu
from benchmarks.surroundings import environment

import meshwright as mw

CASES = (
    ("gpt-4x256", 8, "single,precision=bf16"),
    ("gpt-12x768", 4, "single,precision=bf16"),
    ("gpt-12x768", 16, "single,precision=bf16"),
    ("gpt-12x768", 16, "single,precision=bf16,recompute=full"),
    ("gpt-12x768", 16, "single,precision=bf16,micro_batches=4"),
    ("gpt-12x768", 8, "single"),
    ("gpt-24x1024", 8, "single,precision=bf16"),
    ("gpt-24x1024", 8, "single,precision=bf16,recompute=full"),
    ("gpt-24x2048", 4, "single,precision=bf16"),
    ("gpt-24x2048", 8, "single,precision=bf16,recompute=full"),
    ("gpt-24x2048", 4, "single"),
)


def measured(size: Size, line: str, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the most bytes that tensors took."""
    device = device_of_this()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    with mw.apply_plan(lambda: GPT(size), line, loss_fn=loss_fn, optimizer=optimizer, seed=0) as model:
        batch = batch_of(size, device)
        times = []
        for index in range(steps + 3):
            wait_for_gpu()
            start = time.perf_counter()
            model.step(batch)
            wait_for_gpu()
            if index >= 3:
                times.append(time.perf_counter() - start)
        return statistics.median(times), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def predicted(size: Size, line: str, clusters: Mapping[str, mw.ClusterSpec]) -> dict[str, Any]:
    """Return what each cluster predicts of a plan; forward and loss are described in the plan's own precision."""
    plan = mw.Plan.parse(line)
    spec = described(dataclasses.replace(size, samples=2), "cuda" if plan.precision == "bf16" else "none")
    train = mw.TrainSpec(global_batch_size=size.samples, optimizer="adamw", precision=plan.precision)
    return {source: mw.predict_plan(spec, cluster, train, plan).to_dict() for source, cluster in clusters.items()}


@functools.cache
def described(size: Size, autocast: Literal["none", "cuda"]) -> mw.ModelSpec:
    """Return a model's description."""
    batch = batch_of(size, torch.device("cpu"))
    return mw.describe_model(functools.partial(GPT, size), batch, loss_fn=loss_fn, autocast=autocast)


def predict_again(recorded: Path, clusters: Mapping[str, mw.ClusterSpec], out: Path) -> None:
    """Predict recorded steps, print ratios before and now, and write the rows."""
    given = json.loads(recorded.read_text())
    rows: list[dict[str, Any]] = []
    for row in given["rows"]:
        size = dataclasses.replace(SIZES[row["size"]["name"]], samples=row["size"]["samples"])
        found = predicted(size, row["plan"], clusters)
        took = row["measured"]
        texts: list[str] = []
        for source, now in found.items():
            times = [sum(one["time"].values()) / took["step_s"] for one in (row[source], now)]
            texts.append(f"{source} {times[0]:.2f} -> {times[1]:.2f}")
        sizes = [sum(one["memory"].values()) / took["allocated_bytes"] for one in (row["probe"], found["probe"])]
        print(
            f"{row['size']['name']} x {size.samples}, {row['plan']}: {', '.join(texts)}; memory {sizes[0]:.2f} -> {sizes[1]:.2f}"
        )
        rows.append({"size": row["size"], "plan": row["plan"], "measured": took, **found})
    out.write_text(json.dumps({"gpu": given["gpu"], "measured": given["date"], "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Probe, predict, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True, help="the data sheet's cluster, such as 1xh100-sxm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--again", type=Path, help="rows that were measured before")
    parser.add_argument("--cluster", type=Path, help="what the probe of these rows wrote")
    arguments = parser.parse_args()
    clusters = {"sheet": mw.load_cluster(arguments.preset)}
    if arguments.again is not None:
        clusters["probe"] = mw.ClusterSpec.from_json(arguments.cluster.read_text())
        predict_again(arguments.again, clusters, arguments.out)
        return
    try:
        clusters["probe"] = mw.probe_cluster(1)
        arguments.out.with_suffix(".cluster.json").write_text(clusters["probe"].to_json())
    except Exception as error:
        print(f"the probe failed: {error!r}", flush=True)
    rows: list[dict[str, Any]] = []
    for name, samples, line in CASES:
        size = dataclasses.replace(SIZES[name], samples=samples)
        row: dict[str, Any] = {"size": dataclasses.asdict(size) | {"name": name}, "plan": line}
        try:
            step_s, peak_bytes = measured(size, line, arguments.steps)
            row |= {"measured": {"step_s": step_s, "allocated_bytes": peak_bytes}}
            row |= predicted(size, line, clusters)
        except Exception as error:
            row["error"] = repr(error)
        rows.append(row)
        print(json.dumps({key: row[key] for key in row if key != "size"})[:600], flush=True)
    about = environment() | {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""}
    arguments.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
