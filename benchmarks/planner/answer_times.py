"""Times of the planner: `meshwright plan` as a process, and searches over many devices in one.

    python -m benchmarks.planner.answer_times --out benchmarks/planner/results/answer_times.json

Wall-clock seconds, ten repetitions each, one after the other; the searches on one core. Commands run as they do where the package
is installed: Python keeps its bytecode, also where the environment says otherwise, and one run before the first that counts makes
it. Exit status 1 where a median exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.surroundings import environment

import meshwright as mw
from meshwright.plan.catalogue.catalogue import find_model

COMMANDS: Final[dict[str, tuple[str, float]]] = {
    "gpt3-175b": ("--cluster 64xa100-80g --global-batch 64", 0.5),
    "llama3-8b": ("--cluster 8xh100-sxm --global-batch 64", 0.5),
    "mixtral-8x7b": ("--cluster 16xh100-sxm --global-batch 64", 0.5),
    "deepseek-v3": ("--cluster 256xh100-sxm --global-batch 256", 0.5),
    "resnet-50": ("--cluster 8xa100-80g --global-batch 256", 0.5),
}
"""Model -> options of `meshwright plan`, and the bound of the whole process [s]."""

SEARCHES: Final = (
    ("gpt3-175b", "1024xa100-80g", 1536, 1.0),
    ("megatron-1t", "16384xh100-sxm", 16384, 5.0),
)
"""Model, cluster, global batch, and the bound [s]."""


def time_command(model: str, options: str, bytecode: str) -> float:
    program = Path(sys.executable).parent / "meshwright"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(
        [program, "plan", model, *options.split()],
        check=False,
        capture_output=True,
        timeout=60,
        env={**kept, "PYTHONPYCACHEPREFIX": bytecode},
    )
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 3):
        raise RuntimeError(f"plan {model} {options} left with {done.returncode}: {done.stderr.decode()}")
    return seconds


def time_search(model: str, cluster: str, batch: int) -> float:
    spec, devices = find_model(model), mw.load_cluster(cluster)
    began = time.perf_counter()
    mw.make_plans(spec, devices, mw.TrainSpec(global_batch_size=batch, precision="bf16"))
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=10)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as bytecode:
        for model, (options, bound) in COMMANDS.items():
            samples = [time_command(model, options, bytecode) for _ in range(1 + given.repetitions)][1:]
            rows.append({"what": f"meshwright plan {model} {options}", "bound_s": bound, "samples_s": samples})
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for model, cluster, batch, bound in SEARCHES:
        samples = [time_search(model, cluster, batch) for _ in range(given.repetitions)]
        rows.append({"what": f"make_plans {model}, {cluster}, {batch} samples", "bound_s": bound, "samples_s": samples})
    for row in rows:
        row["median_s"], row["max_s"] = statistics.median(row["samples_s"]), max(row["samples_s"])
        print(
            f"{row['what']:75}{row['median_s']:6.3f} s, at most {row['max_s']:.3f} s (bound {row['bound_s']} s)",
            flush=True,
        )
    given.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["median_s"] <= row["bound_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
