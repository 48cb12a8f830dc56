"""Make a run's folder whose names are hostile, and one of 100,000 steps and 64 ranks: `made_up_runs.py hostile|large FOLDER`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from meshwright.spec.plan import Plan
from meshwright.spec.prediction import Prediction, TimeBreakdown
from meshwright.spec.record import HeldTensor, Measurement, RunRecord

NAME = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&amp;\u2028\u202e\x1b[31m"


def step_event(step: int, rng: random.Random) -> dict[str, object]:
    return {
        "event": "step", "time": 1.0 + step, "step": step, "loss": 10 / step**0.2 + rng.gauss(0, 0.05),
        "grad_norm": rng.uniform(0.1, 9), "lr": 3e-4, "skipped": False, "num_samples": 64, "num_tokens": 8192,
        "seconds": rng.uniform(0.4, 0.6), "step_seconds": rng.uniform(0.3, 0.4), "samples_per_s": 100.0,
        "tokens_per_s": rng.uniform(1e4, 2e4), "peak_memory_bytes": 2**33, "eta_s": 1.0,
    }  # fmt: skip


def write(folder: Path, name: str, record: RunRecord, num_steps: int, more: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(record.to_json(indent=2))
    rng = random.Random(0)
    start = {"event": "run_started", "name": name, "plan": str(record.plan), "device": "cuda:0", "steps": num_steps}
    with (folder / "events.jsonl").open("w") as file:
        for event in (start, *(step_event(step, rng) for step in range(1, num_steps + 1)), *more):
            file.write(json.dumps(event) + "\n")


def large(folder: Path) -> None:
    steps, rng = 100_000, random.Random(0)
    held: dict[str, str] = {}
    for rank in range(64):
        column, first = 512 * (rank % 2), rank // 2 * 8192
        held[str(rank)] = f"dim 0: {column}-{column + 512} of 1024; entries {first}-{first + 8192} of 524288"
    names = [
        f"layers.{layer}.{name}.weight" for layer in range(44) for name in ("q", "k", "v", "o", "up", "down", "gate")
    ]
    measurement = Measurement(
        step_seconds=tuple(rng.uniform(0.4, 0.6) for _ in range(steps)), num_samples=steps * 64, num_tokens=steps * 8192,
        peak_memory_bytes=2**33, rank_peak_memory_bytes=tuple(2**33 - rank * 10**6 for rank in range(64)),
        rank_wait_s=(0.05,) * 64, loss=1.0,
    )  # fmt: skip
    record = RunRecord(
        plan=Plan.parse("dp=32,tp=2,zero=1"),
        prediction=Prediction(time=TimeBreakdown(forward_s=0.1, backward_s=0.2)),
        measurement=measurement,
        tensors={name: HeldTensor(shape=(1024, 1024), held=held) for name in names},
    )
    write(folder, "large", record, steps, [])


def hostile(folder: Path) -> None:
    plan = Plan.parse("dp=2,tp=2").replace(layouts={NAME: NAME}, reasons=(NAME, "x" * 5000))
    tensors = {NAME: HeldTensor(shape=(2,), held={"0": NAME})}
    tensors["y" * 5000 + ".weight"] = HeldTensor(shape=(4,), held={"0-3": "whole"})
    failed: dict[str, object] = {"event": "failed", "rank": 1, "type": NAME, "text": NAME, "traceback": NAME * 3}
    record = RunRecord(plan=plan, config={NAME: NAME}, tensors=tensors)
    write(folder, NAME + "z" * 5000, record, 30, [failed, {"event": NAME, NAME: NAME}])


if __name__ == "__main__":
    {"large": large, "hostile": hostile}[sys.argv[1]](Path(sys.argv[2]))
