"""What a trace costs, and whether its drawn idle share is the measured one; writes results/timeline.json.

python benchmarks/timeline/bench.py [--pairs N]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "examples")]

import torch  # noqa: E402
from tests import trace_format  # noqa: E402
from tests.parity.jobs import trace_jobs  # noqa: E402

import meshwright as mw  # noqa: E402
from gpt import build_gpt  # noqa: E402
from meshwright.comm.spans import SpanRecorder  # noqa: E402
from meshwright.report.step_picture import draw_step  # noqa: E402
from meshwright.report.step_times import steps_of  # noqa: E402
from meshwright.report.trace_read import read_trace  # noqa: E402
from meshwright.spec.plan import Plan  # noqa: E402

SMALL = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "max_length": 64}
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_length": 16}
CASES = (
    ("gpt, 0.8 M parameters", "dp=2", SMALL, 8),
    ("gpt, 0.8 M parameters", "tp=2", SMALL, 8),
    ("gpt, 0.8 M parameters", "pp=2,micro_batches=4", SMALL, 8),
    ("gpt, 0.8 M parameters", "dp=2,zero=3,whole_below=0B", SMALL, 8),
    ("gpt, 35 k parameters", "tp=2", TINY, 8),
    ("gpt, 35 k parameters", "pp=2,micro_batches=4", TINY, 8),
)


def loss_fn(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def alternate(plan: str, sizes: dict[str, int], samples: int, pairs: int) -> dict[str, Any]:
    """Take steps with and without a recorder in turn; return the seconds of each."""
    found: dict[str, list[float]] = {"off": [], "on": []}
    ids = torch.randint(256, (samples, sizes["max_length"] + 1), generator=torch.Generator().manual_seed(0))
    pair = (ids[:, :-1], ids[:, 1:])
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    build = functools.partial(build_gpt, **sizes)
    with mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=optimizer, sentinel_every=0) as model:
        batch = mw.split_batch(pair, model)
        for _ in range(5):
            model.step(batch)
        recorder = SpanRecorder()
        for number in range(2 * pairs):
            # Of each pair another one comes first, so that a drift of the machine cancels.
            kind = ("off", "on")[(number + number // 2) % 2]
            model.world.default_group.barrier()
            model.ledger.recorder = recorder if kind == "on" else None
            began = time.perf_counter()
            model.step(batch)
            found[kind].append(time.perf_counter() - began)
            model.ledger.recorder = None
        num_spans = (len(recorder.spans) + len(recorder.flights)) / pairs
    return found | {"spans": num_spans}


def cost(pairs: int, span_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, plan, sizes, samples in CASES:
        found = mw.launch(alternate, Plan.parse(plan).num_ranks, plan, sizes, samples, pairs, threads_per_rank=1)
        one = found[0]
        ratios = [on / off for on, off in zip(one["on"], one["off"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        step_s = statistics.median(one["off"])
        row = {
            "model": name, "plan": plan, "step_s": step_s, "spans": one["spans"], "ratio": statistics.median(ratios),
            "quartiles": [low, high], "spans_over_step": one["spans"] * span_s / step_s, "off_s": one["off"], "on_s": one["on"],
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name} {plan}: {step_s * 1e3:.2f} ms, {one['spans']:.0f} spans, ratio {row['ratio']:.4f} "
            f"({low:.4f} to {high:.4f}), spans alone {row['spans_over_step']:.3%}",
            flush=True,
        )
    return rows


def of_one_span() -> dict[str, float]:
    """Return what a span costs, recorded and not [s]."""
    from meshwright.comm.ledger import Ledger

    seconds: dict[str, float] = {}
    for name, recorder in (("off", None), ("on", SpanRecorder())):
        ledger = Ledger(recorder=recorder)
        began = time.perf_counter()
        for _ in range(100_000):
            with ledger.span("wait", "all_reduce", None):
                pass
        seconds[name] = (time.perf_counter() - began) / 100_000
    return seconds


def idle(steps: int) -> dict[str, Any]:
    """Compare the drawn idle share of timed sleeps with the ranks' own measure, and with the sleeps alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        measured = mw.launch(trace_jobs.sleep_in_stages, 4, str(path), 0.05, 0.1, 8, steps, threads_per_rank=1)
        data = json.loads(path.read_text())
        faults = trace_format.faults_of(data)
        trace = read_trace(path.parent, data["otherData"]["id"])
        rows: list[dict[str, float]] = []
        for number, step in enumerate(steps_of(trace)):
            begins, ends, waits = zip(*[rank[number] for rank in measured], strict=True)
            window = max(ends) - min(begins)
            busy = sum(end - begin - wait for begin, end, wait in zip(begins, ends, waits, strict=True))
            picture = draw_step(trace, [step], Plan.parse("pp=4,micro_batches=8"))
            width = max(box.x + box.width for lane in picture.lanes for box in lane.boxes)
            drawn = sum(
                next(box for box in lane.boxes if box.kind == "step").width
                - sum(box.width for box in lane.boxes if box.kind == "wait")
                for lane in picture.lanes
            )
            rows.append(
                {"step_s": window, "measured": 1 - busy / 4 / window, "drawn": 1 - drawn / 4 / width,
                 "all_but_sleep": 1 - 8 * 0.15 / window, "simulated": picture.simulated_idle_fraction or 0.0}
            )  # fmt: skip
        return {"faults": faults, "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100)
    pairs = parser.parse_args().pairs
    span_s = of_one_span()
    result = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"), "span_s": span_s, "idle": idle(3), "cost": cost(pairs, span_s["on"]),
    }  # fmt: skip
    (HERE / "results" / "timeline.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"span_s": result["span_s"], "idle": result["idle"]}, indent=1))


if __name__ == "__main__":
    main()
