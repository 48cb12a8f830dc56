"""Whether the drawn idle share is the measured one, and what a span alone takes; writes results/timeline.json.

python benchmarks/timeline/bench.py
"""

from __future__ import annotations

import json
import os
import platform
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
from meshwright.comm.spans import SpanRecorder  # noqa: E402
from meshwright.report.step_picture import draw_step  # noqa: E402
from meshwright.report.step_times import steps_of  # noqa: E402
from meshwright.report.trace_read import read_trace  # noqa: E402
from meshwright.spec.plan import Plan  # noqa: E402


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
    span_s = of_one_span()
    result = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"), "span_s": span_s, "idle": idle(5),
    }  # fmt: skip
    (HERE / "results" / "timeline.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"span_s": result["span_s"], "idle": result["idle"]}, indent=1))


if __name__ == "__main__":
    main()
