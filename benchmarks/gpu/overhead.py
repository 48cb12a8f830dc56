"""One GPU under the plan "single" beside the loop of a textbook: time of a step, in turns.

python -m benchmarks.gpu.overhead --out benchmarks/gpu/results/overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.gpt import GPT, SIZES, batch_of, loss_fn
from benchmarks.surroundings import environment

import meshwright as mw

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, dtype: Any, reads: bool) -> None:
    """Take one step of a textbook's loop; `reads` tells whether loss and norm become numbers of the host."""
    optimizer.zero_grad(set_to_none=True)
    cast = torch.autocast(batch[0].device.type, dtype) if dtype is not None else contextlib.nullcontext()
    with cast:
        loss = loss_fn(model(batch[0]), batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if reads:
        loss.item(), norm.item()


def device_of_this() -> torch.device:
    """Return the first GPU; the CPU where there is none, to try this file."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait_for_gpu() -> None:
    """Wait until everything that was given to the GPU is done; on the CPU it is."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(step: Callable[[], Any], count: int) -> float:
    """Return seconds a step, of `count` in a row."""
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait_for_gpu()
    return (time.perf_counter() - start) / count


def measure(name: str, precision: str, rounds: int, budget_s: float, **options: Any) -> dict[str, Any]:
    """Return milliseconds and ratios of one size: ours, plain that reads its loss, plain that does not."""
    size, device = SIZES[name], device_of_this()
    batch = batch_of(size, device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    torch.manual_seed(0)
    plain = GPT(size).to(device)
    optimizer = ADAMW(plain.parameters())
    line = f"single,precision={precision}"
    ours = mw.apply_plan(
        lambda: GPT(size), line, loss_fn=loss_fn, optimizer=ADAMW, seed=0, max_grad_norm=1.0, **options
    )
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.step(batch),
        "plain": lambda: plain_step(plain, optimizer, batch, dtype, True),
        "plain_async": lambda: plain_step(plain, optimizer, batch, dtype, False),
    }
    try:
        for step in sides.values():
            seconds(step, 3)
        slowest = max(seconds(step, 3) for step in sides.values())
        count = max(3, int(budget_s / (rounds * 3 * slowest)))
        found: dict[str, list[float]] = {side: [] for side in sides}
        for index in range(rounds):
            names = list(sides)
            for side in names[index % 3 :] + names[: index % 3]:
                found[side].append(seconds(sides[side], count))
        profile = profile_of(sides["ours"], 20) if name == next(iter(SIZES)) else ""
    finally:
        ours.close()

    def ratio(other: str) -> dict[str, float]:
        ratios = [mine / theirs for mine, theirs in zip(found["ours"], found[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {"median": middle, "low": low, "high": high}

    return {
        "size": name,
        "plan": line,
        "options": options,
        "steps_a_block": count,
        "ms": {side: 1e3 * statistics.median(times) for side, times in found.items()},
        "ratio_to_plain": ratio("plain"),
        "ratio_to_plain_async": ratio("plain_async"),
        "samples_ms": {side: [round(1e3 * one, 4) for one in times] for side, times in found.items()},
        "profile": profile,
    }


def profile_of(step: Callable[[], Any], count: int) -> str:
    """Return where the host's time of a step goes, by own time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
    return text.getvalue()


def main() -> None:
    """Measure all sizes and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=8.0, help="seconds for each size and precision")
    parser.add_argument("--cases", default="gpt-4x256:fp32 gpt-12x768:bf16 gpt-24x1024:bf16 gpt-24x2048:bf16")
    arguments = parser.parse_args()
    rows = []
    about = environment() | {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""}
    for case in arguments.cases.split():
        name, _, precision = case.partition(":")
        row = measure(name, precision, arguments.rounds, arguments.budget_s)
        rows.append(row)
        print(case, row["ms"], row["ratio_to_plain"], row["ratio_to_plain_async"], flush=True)
        arguments.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
