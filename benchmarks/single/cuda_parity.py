"""One-process plans on a GPU beside plain PyTorch on the CPU, in float64: every model of tests/parity.

python benchmarks/single/cuda_parity.py [--device cuda:0]
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from pathlib import Path

import torch

import meshwright as mw
from meshwright import testing

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("tests", "examples")]
from parity import cases  # noqa: E402

PLANS = {
    "single": 1,
    "single,micro_batches=2": 1,
    "single,micro_batches=2,recompute=full": 1,
    "data_parallel": 2,
    "model_parallel": 2,
}


def verdict_of(name: str, plan_text: str, num_devices: int, device: str) -> str:
    """Return "equal", "refused", or what is wrong."""
    case = cases.find(name)
    batches = case.batches(7, 2)
    options = testing.StepOptions(num_steps=2, optimizer=case.optimizer)
    kind, _, words = plan_text.partition(",")
    plan = mw.Plan.preset(kind, num_devices)
    if words:
        plan = mw.Plan.parse(f"{plan},{words}" if str(plan) else words, num_devices=num_devices)
    expected = testing.oracle_steps(case.build, batches, case.loss_fn, num_steps=2, optimizer=case.optimizer)
    try:
        got = testing.plan_steps(
            case.build, plan, batches, case.loss_fn, options=options, devices=[device] * num_devices
        )
    except mw.MeshwrightError as error:
        return f"refused: {error.message[:90]}"
    try:
        testing.assert_parity(got, expected, 1e-9)
    except AssertionError as error:
        return f"WRONG: {str(error).splitlines()[0][:160]}"
    return "equal"


def main() -> None:
    """Run all and print what is not equal, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32)
    names = [name for name in cases.CASES if name not in cases.PIECEWISE]
    for plan, num_devices in PLANS.items():
        counts: collections.Counter[str] = collections.Counter()
        for name in names:
            try:
                verdict = verdict_of(name, plan, num_devices, device)
            except Exception as error:
                verdict = f"CRASHED: {type(error).__name__}: {str(error)[:140]}"
            counts[verdict.partition(":")[0]] += 1
            if verdict != "equal":
                print(f"  {plan:40} {name:24} {verdict}", flush=True)
        print(f"{plan}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
