"""Shrink a failing program: take away blocks, steps, features and ranks for as long as the verdict stays.

python -m benchmarks.fuzz.shrink --seed 50018 --plans tp,pp
python -m benchmarks.fuzz.shrink --results benchmarks/fuzz/results/today.json --minutes 20
"""

from __future__ import annotations

import argparse
import copy
import json
import pprint
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz import engine, verdict
from benchmarks.fuzz.draw import PLAN_KINDS, draw
from benchmarks.fuzz.program import complete, features
from benchmarks.fuzz.verdict import Verdict

_KEPT_OF_BLOCK = ("kind", "heads")
_SIMPLE: dict[str, Any] = {
    "clip": None, "mask": False, "ragged": False, "built_first": False, "batch_form": "dict",
    "optimizer": {"kind": "sgd", "lr": 0.3}, "loss": {"kind": "ce"},
}  # fmt: skip
_SIMPLE_MODEL: dict[str, Any] = {
    "output": "tensor", "tie": "none", "pool": "none", "head_norm": "layer", "head_bias": True, "frozen": [], "stem": {},
}  # fmt: skip


def without(items: list[Any], index: int) -> list[Any]:
    return items[:index] + items[index + 1 :]


def reductions(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield programs that are simpler by one thing, the largest things first."""
    for change in (_plans, _actions, _blocks, _options, _values):
        for made in change(program):
            smaller = copy.deepcopy(made)
            yield complete(smaller)


def _plans(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    words = program["plan"].split(",")
    for index, word in enumerate(words):
        name, _, number = word.partition("=")
        rest = [
            w
            for w in without(words, index)
            if name not in ("schedule", "pp") or not w.startswith(("virtual", "schedule"))
        ]
        if rest and not (
            name in ("data_parallel", "model_parallel", "single") or (name == "dp" and "zero=" in program["plan"])
        ):
            yield {**program, "plan": ",".join(rest)}
        if name in ("dp", "tp", "micro_batches") and int(number) > 2:
            yield {**program, "plan": ",".join([*words[:index], f"{name}=2", *words[index + 1 :]])}


def _actions(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    script = program["script"]
    for index in range(len(script)):
        left = without(script, index)
        if any(action["do"] in ("step", "eval", "forward") for action in left):
            yield {**program, "script": left}


def _blocks(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = program["model"]
    for index in range(len(model["calls"])):
        if sum(call[0] == model["calls"][index][0] for call in model["calls"]) > 1:
            yield {**program, "model": {**model, "calls": without(model["calls"], index)}}
    for index in range(len(model["blocks"])):
        if len(model["blocks"]) > 1:
            calls = [[n - (n > index), flag] for n, flag in model["calls"] if n != index]
            if calls:
                yield {**program, "model": {**model, "blocks": without(model["blocks"], index), "calls": calls}}


def _options(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = program["model"]
    for name in ("root", "stem"):
        for key in model.get(name, {}):
            left = {k: v for k, v in model[name].items() if k != key}
            yield {**program, "model": {**model, name: left}}
    for name, value in _SIMPLE.items():
        if program.get(name, value) != value:
            yield {**program, name: value}
    for key in program["loss"]:
        if key != "kind":
            yield {**program, "loss": {k: v for k, v in program["loss"].items() if k != key}}
    for name, value in _SIMPLE_MODEL.items():
        if model.get(name, value) != value:
            yield {**program, "model": {**model, name: value}}


def _values(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = program["model"]
    for index, form in enumerate(model["blocks"]):
        simpler = [{k: v for k, v in form.items() if k != key} for key in form if key not in _KEPT_OF_BLOCK]
        if form["kind"] not in ("mlp", "residual") and model["domain"] != "images":
            simpler.insert(0, {"kind": "mlp", "act": "tanh"})
        if form.get("act") not in (None, "tanh"):
            simpler.append({**form, "act": "tanh"})
        for made in simpler:
            blocks = [*model["blocks"][:index], made, *model["blocks"][index + 1 :]]
            yield {**program, "model": {**model, "blocks": blocks}}
    for index, action in enumerate(program["script"]):
        for key, value in (("n", 4), ("t", 4), ("n", 2), ("flags", None)):
            if key in action and action[key] != value and (key != "n" or action[key] > value):
                changed = {k: v for k, v in {**action, key: value}.items() if v is not None}
                script = [*program["script"][:index], changed, *program["script"][index + 1 :]]
                yield {**program, "script": script}


def key_of(found: Verdict) -> str:
    """Return what stays the same while a program shrinks: the verdict, and the kind of the exception."""
    if found.kind not in ("wrong", "crashed"):
        return found.kind
    if found.kind == "crashed":
        return f"crashed {re.sub(r'[0-9]+', 'N', found.detail)[:60]}"
    return "wrong between ranks" if "against rank 0" in found.detail else "wrong"


def shrink(program: dict[str, Any], seconds: float = 120.0, timeout_s: float = 8.0) -> tuple[dict[str, Any], Verdict]:
    """Return the smallest program found with the same verdict, and that verdict."""
    end = time.monotonic() + seconds
    found, _ = engine.run_program(program, timeout_s)
    if found.kind not in verdict.BUGS:
        return program, found
    wanted, progress = key_of(found), True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in reductions(program):
            if time.monotonic() > end:
                break
            if smaller == program:
                continue
            now, _ = engine.run_program(smaller, timeout_s)
            if key_of(now) == wanted:
                program, found, progress = smaller, now, True
                break
    return program, found


def standalone(program: dict[str, Any]) -> str:
    """Return a script that runs the program."""
    shown = {
        k: v
        for k, v in program.items()
        if k not in ("mode", "ranks", "degree", "micro_batches", "pieces", "random", "kind")
    }
    text = pprint.pformat(shown, width=118, sort_dicts=False, compact=True)
    return (
        "from benchmarks.fuzz import engine\nfrom benchmarks.fuzz.program import complete\n\n"
        f"PROGRAM = {text}\n\n"
        'if __name__ == "__main__":\n    print(*engine.run_program(complete(PROGRAM)))\n'
    )


def report(program: dict[str, Any], seconds: float) -> None:
    smallest, found = shrink(program, seconds)
    print(f"\n### seed {program['seed']}, {program['plan']}: {found.kind}\n{found.detail}")
    print(f"features: {', '.join(features(smallest))}")
    print(f"\n```python\n{standalone(smallest)}```", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plans", default=",".join(PLAN_KINDS), help="as they were given to run")
    parser.add_argument("--results", type=Path, default=None, help="what run has written: each kind of failure once")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each program")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        report(draw(arguments.seed, tuple(arguments.plans.split(","))), 60 * arguments.minutes)
    if arguments.results is not None:
        seen: set[str] = set()
        for row in json.loads(arguments.results.read_text())["programs"]:
            key = f"{row['plan_kind']} {key_of(Verdict(row['verdict'], row.get('detail', '')))}"
            if row["verdict"] in verdict.BUGS and key not in seen:
                seen.add(key)
                report(row["program"], 60 * arguments.minutes)


if __name__ == "__main__":
    main()
