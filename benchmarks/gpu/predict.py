"""Steps of one GPU as the planner predicts them, from the data sheet and from a probe, beside measured ones.

python -m benchmarks.gpu.predict --preset 1xh100-sxm --out benchmarks/gpu/results/predicted.json

`--measure-only` leaves the predictions out. Without a GPU, measured steps are predicted, by the data sheet and by the probe
of that time:

python -m benchmarks.gpu.predict --preset 1xh200-sxm --again benchmarks/gpu/results/predicted.json \\
    --cluster benchmarks/gpu/results/h200.cluster.json --out benchmarks/gpu/results/predicted_autocast.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.gpu.gpt import GPT, SIZES, batch_of, loss_fn
from benchmarks.gpu.others import OTHERS, Workload
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
"""Model, samples of a batch, plan: those by which the costs under autocast were found."""

FURTHER = (
    ("gpt-4x256", 8, "single"),
    ("gpt-12x768", 8, "single,precision=bf16"),
    ("llama-16x1536", 4, "single,precision=bf16"),
    ("llama-16x1536", 8, "single,precision=bf16,recompute=full"),
    ("bert-24x1024", 16, "single,precision=bf16"),
    ("vit-24x1024", 32, "single,precision=bf16"),
    ("vit-24x1024", 32, "single,precision=bf16,recompute=selective"),
    ("vit-24x1024", 16, "single"),
    ("resnet-50", 64, "single,precision=bf16"),
    ("resnet-50", 64, "single"),
)
"""Those that were measured afterwards: other models, by which nothing was fitted."""


def workload_of(name: str) -> Workload:
    """Return a model by its name, with its batch and loss."""
    if name in OTHERS:
        return OTHERS[name]
    size = SIZES[name]

    def batch(samples: int, device: torch.device) -> Any:
        return batch_of(dataclasses.replace(size, samples=samples), device)

    return Workload(functools.partial(GPT, size), batch, loss_fn)


def measured(workload: Workload, samples: int, line: str, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the most bytes that tensors took."""
    device = device_of_this()
    if device.type == "cuda":
        gc.collect()  # of the model before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    with mw.apply_plan(workload.build, line, loss_fn=workload.loss_fn, optimizer=optimizer, seed=0) as model:
        batch = workload.batch_of(samples, device)
        times = []
        for index in range(steps + 3):
            wait_for_gpu()
            start = time.perf_counter()
            model.step(batch)
            wait_for_gpu()
            if index >= 3:
                times.append(time.perf_counter() - start)
        return statistics.median(times), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def predicted(name: str, samples: int, line: str, clusters: Mapping[str, mw.ClusterSpec]) -> dict[str, Any]:
    """Return what each cluster predicts of a plan; forward and loss are described in the plan's own precision."""
    plan = mw.Plan.parse(line)
    spec = described(name, "cuda" if plan.precision == "bf16" else "none")
    train = mw.TrainSpec(global_batch_size=samples, optimizer="adamw", precision=plan.precision)
    return {source: mw.predict_plan(spec, cluster, train, plan).to_dict() for source, cluster in clusters.items()}


@functools.cache
def described(name: str, autocast: Literal["none", "cuda"]) -> mw.ModelSpec:
    """Return a model's description."""
    workload = workload_of(name)
    batch = workload.batch_of(2, torch.device("cpu"))
    return mw.describe_model(workload.build, batch, loss_fn=workload.loss_fn, autocast=autocast)


def predict_again(recorded: Path, clusters: Mapping[str, mw.ClusterSpec], out: Path) -> None:
    """Predict recorded steps, print ratios (before and) now, and write the rows."""
    given = json.loads(recorded.read_text())
    rows: list[dict[str, Any]] = []
    for row in given["rows"]:
        name, samples = _case_of(row)
        found = predicted(name, samples, row["plan"], clusters)
        took = row["measured"]
        texts: list[str] = []
        for source, now in found.items():
            times = [sum(one["time"].values()) / took["step_s"] for one in (row.get(source), now) if one]
            texts.append(f"{source} {' -> '.join(f'{time:.2f}' for time in times)}")
        pairs = [one["memory"] for one in (row.get("probe"), found["probe"]) if one]
        taken = took["allocated_bytes"]
        sizes = [sum(memory.values()) / taken for memory in pairs] if taken else []
        texts.append(f"memory {' -> '.join(f'{size:.2f}' for size in sizes)}")
        print(f"{name} x {samples}, {row['plan']}: {', '.join(texts)}")
        rows.append({key: value for key, value in row.items() if key not in clusters} | found)
    environs = given.get("environment", given)  # rows of one GPU had no environment once
    about = {"gpu": environs["gpu"], "measured": environs.get("date") or given["measured"]}
    out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _case_of(row: Mapping[str, Any]) -> tuple[str, int]:
    size = row.get("size", row)
    return size["name"], size["samples"]


def main() -> None:
    """Probe, predict, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True, help="the data sheet's cluster, such as 1xh100-sxm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--further", action="store_true", help="the further models")
    parser.add_argument("--measure-only", action="store_true", help="predict nothing")
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
    about = environment() | {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""}
    for name, samples, line in FURTHER if arguments.further else CASES:
        row: dict[str, Any] = {"name": name, "samples": samples, "plan": line}
        try:
            step_s, peak_bytes = measured(workload_of(name), samples, line, arguments.steps)
            row |= {"measured": {"step_s": step_s, "allocated_bytes": peak_bytes}}
            row |= {} if arguments.measure_only else predicted(name, samples, line, clusters)
        except Exception as error:
            row["error"] = repr(error)
        rows.append(row)
        print(json.dumps(row)[:400], flush=True)
        arguments.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
