"""Make the runs whose reports are checked, each with its report: `make_runs.py FOLDER`, some minutes on two cores.

Runs of each kind of plan, three steps of each traced; one whose launching process is killed; one resumed under another plan;
those of `made_up_runs.py`; and one file of four runs. What has its report in FOLDER already is not made again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "examples" / "gpt_python.toml"
PLANS = (
    "single", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,recompute=full", "pp=2,micro_batches=4",
    "pp=2,micro_batches=4,schedule=zbv", "dp=2,tp=2", "dp=2,pp=2,tp=2,micro_batches=2", "dp=2,compress=int8",
    "dp=2,precision=bf16", "data_parallel", "model_parallel",
)  # fmt: skip
DEADLINE_S = 240
SHORT = {"train.global_batch_size": "16", "train.eval_every": "10", "train.eval_batches": "2"}


def name_of(plan: str) -> str:
    return plan.replace(",", "_").replace("=", "_")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *words]


def train(name: str, plan: str, steps: int, *more: str) -> list[str]:
    settings = SHORT | {"train.name": name, "train.steps": str(steps)}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return command("train", str(CONFIG), "--plan", plan, *sets, *more)


def run(folder: Path, words: list[str]) -> None:
    began = time.monotonic()
    done = subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(f"{time.monotonic() - began:5.1f} s  {' '.join(words[3:])}", flush=True)


def kill_one(folder: Path, name: str) -> None:
    """Start a long run, and kill its launching process by SIGKILL after some steps."""
    events = folder / "runs" / name / "events.jsonl"
    process = subprocess.Popen(
        train(name, "dp=2", 5000, "--trace", "3-4"), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + DEADLINE_S
    while not events.is_file() or len(events.read_text().splitlines()) < 20:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit("the run to be killed did not come to its twentieth line")
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    print(f"killed {name}", flush=True)


def is_new(folder: Path, name: str) -> bool:
    """Return whether a run has no report yet; what there is of it is removed then."""
    if (folder / "runs" / name / "report.html").is_file():
        return False
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    return True


def has_step(folder: Path, name: str, step: int) -> bool:
    """Return whether a run has taken this step: one that was cut before it was resumed has a report too."""
    events = folder / "runs" / name / "events.jsonl"
    lines = events.read_text().splitlines() if events.is_file() else []
    return any((event := json.loads(line))["event"] == "step" and event["step"] == step for line in lines)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for plan in PLANS:
        if is_new(folder, name_of(plan)):
            run(folder, train(name_of(plan), plan, 20, "--trace", "10-12"))
    if is_new(folder, "killed"):
        kill_one(folder, "killed")
        run(folder, command("report", "runs/killed"))
    if not has_step(folder, "resumed", 20) or is_new(folder, "resumed"):
        shutil.rmtree(folder / "runs" / "resumed", ignore_errors=True)
        run(folder, train("resumed", "dp=2", 14))
        run(folder, [*train("resumed", "tp=2", 20, "--trace", "16-17"), "--resume"])
    for kind in ("hostile", "large"):
        if is_new(folder, kind):
            run(folder, [sys.executable, str(HERE.resolve() / "made_up_runs.py"), kind, f"runs/{kind}"])
            run(folder, command("report", f"runs/{kind}"))
    four = [f"runs/{name}" for name in ("dp_2", "tp_2", "single", "pp_2_micro_batches_4")]
    run(folder, command("report", *four, "-o", "runs/single/many.html"))
    kept = sorted(str(path.relative_to(folder)) for path in (folder / "runs").glob("*/*.html"))
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
