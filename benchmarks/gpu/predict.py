"""Steps of one GPU as the planner predicts them, from the data sheet and from a probe, beside measured ones.

python -m benchmarks.gpu.predict --preset 1xh100-sxm --out benchmarks/gpu/results/predicted.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Probe, predict, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True, help="the data sheet's cluster, such as 1xh100-sxm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    clusters = {"data sheet": mw.load_cluster(arguments.preset)}
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
            spec = mw.describe_model(functools.partial(GPT, size), batch_of(size, torch.device("cpu")), loss_fn=loss_fn)
            plan = mw.Plan.parse(line)
            train = mw.TrainSpec(global_batch_size=samples, optimizer="adamw", precision=plan.precision)
            for source, cluster in clusters.items():
                found = mw.predict_plan(spec, cluster, train, plan).to_dict()
                row[source] = found
        except Exception as error:
            row["error"] = repr(error)
        rows.append(row)
        print(json.dumps({key: row[key] for key in row if key != "size"})[:600], flush=True)
    about = environment() | {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""}
    arguments.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
