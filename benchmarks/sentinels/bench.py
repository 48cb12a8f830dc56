"""What sentinels cost: steps with the default and with sentinel_every=0, in turns, in one process group.

    python benchmarks/sentinels/bench.py --out benchmarks/sentinels/results/NAME.json
    python benchmarks/sentinels/bench.py --quick

The three GPTs of benchmarks/peers, under every kind of plan. Both models live in the same two ranks and step on the same batches;
blocks of each take turns. Within a block one step has a sentinel and the others have not, so the two costs are told apart: what
every step pays (the agreement), and what one sentinel pays (digests, settings, an inspection). With the default a sentinel comes
once in 100 steps, and the share of the whole is reckoned from the two.

Exit status 1 where a plan pays more than 1 % by the time inside of the sentinels' calls; ratios of steps vary by more than that.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import meshwright as mw

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "peers")]

from cases import CASES, MICRO_BATCHES, build_gpt, loss_fn, make_batch  # noqa: E402

from surroundings import environment  # noqa: E402

PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2")
BOUND = 0.01
DEFAULT_EVERY = 100


TIMED = ("sayings", "explain", "begin_step", "begin_forward", "end_backward", "end_step")
"""What a step calls of its sentinels."""


class Clock:
    """Adds up the time inside of the calls that it is put around [s]; calls inside of others count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Any) -> Any:
        """Return the function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.perf_counter() - begin

        return timed

    def read(self) -> float:
        """Return what was added up since the last call of this."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def put_clock(model: mw.ParallelModel, clock: Clock) -> None:
    """Have the calls of a model's sentinels timed, and its inspections of parts, which run inside of forward."""
    sentinels: Any = model.stepper.sentinels
    for name in TIMED:
        setattr(sentinels, name, clock.around(getattr(sentinels, name)))
    engine: Any = model.engine
    for part in getattr(getattr(engine, "cutting", None), "parts", ()):
        part._inspect = clock.around(part._inspect)


def share_of(case: str, plan: str, step: int) -> Any:
    """Return this rank's share: its own under data parallelism, all of it where ranks share layers."""
    if plan.startswith("dp"):
        return make_batch(case, mw.current_world().rank, step)
    return tuple(torch.cat(parts) for parts in zip(*(make_batch(case, rank, step) for rank in range(2)), strict=True))


def on_rank(case: str, plan: str, rounds: int, block: int) -> dict[str, list[list[float]]]:
    """Run on each rank; returns the seconds of each step, block by block, of both models, and of sentinels alone ("direct")."""
    line = f"{plan},micro_batches={MICRO_BATCHES[case]}" if plan.startswith("pp") else plan
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    batches = [share_of(case, plan, step) for step in range(4)]
    models = {
        name: mw.apply_plan(
            functools.partial(build_gpt, case), line, loss_fn=loss_fn, optimizer=optimizer, sentinel_every=every
        )
        for name, every in (("off", 0), ("on", block))
    }
    seconds: dict[str, list[list[float]]] = {"off": [], "on": [], "direct": []}
    clock = Clock()
    for turn in range(-1, rounds):
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            block_seconds: list[float] = []
            direct: list[float] = []
            if turn == 0 and name == "on":
                put_clock(models[name], clock)
            for step in range(block):
                begin = time.perf_counter()
                models[name].step(batches[step % len(batches)])
                block_seconds.append(time.perf_counter() - begin)
                direct.append(clock.read())
            if turn >= 0:  # the first turn of each warms up
                seconds[name].append(block_seconds)
                if name == "on":
                    seconds["direct"].append(direct)
    for model in models.values():
        model.close()
    return seconds


def conclude(seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return the medians and quartiles of one plan: step 0 of a block is the one that has a sentinel."""
    plain = [statistics.median(block[1:]) for block in seconds["off"]]
    watched = [statistics.median(block[1:]) for block in seconds["on"]]
    ratios = sorted(on / off for on, off in zip(watched, plain, strict=True))
    sentinels = [block[0] - typical for block, typical in zip(seconds["on"], watched, strict=True)]
    quarter = len(ratios) // 4
    step_s, sentinel_s = statistics.median(plain), max(0.0, statistics.median(sentinels))
    every_s = statistics.median(statistics.median(block[1:]) for block in seconds["direct"])
    one_s = statistics.median(block[0] for block in seconds["direct"])
    return {
        "step_ms": 1e3 * step_s,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[quarter], ratios[-1 - quarter]],
        "sentinel_ms": 1e3 * sentinel_s,
        "share_at_default": statistics.median(ratios) - 1 + sentinel_s / (DEFAULT_EVERY * step_s),
        "direct_every_us": 1e6 * every_s,
        "direct_sentinel_ms": 1e3 * one_s,
        "direct_share_at_default": (every_s + one_s / DEFAULT_EVERY) / step_s,
        "num_rounds": len(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each of the two")
    parser.add_argument("--block", type=int, default=10, help="steps of a block, the first with a sentinel")
    parser.add_argument("--quick", action="store_true", help="the shortest steps alone, few rounds: does it run?")
    parser.add_argument("--out", type=Path, help="where the samples go, as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.cases, arguments.rounds = ["latency-bound"], 4
    found: list[dict[str, Any]] = []
    print(
        f"{'case':16} {'plan':12} {'step':>9} {'every step':>24} {'one sentinel':>13} {'in all':>8} "
        f"| {'direct: every':>13} {'one':>9} {'in all':>7}"
    )
    for case in arguments.cases:
        for plan in arguments.plans:
            per_rank = mw.launch(on_rank, 2, case, plan, arguments.rounds, arguments.block, threads_per_rank=1)
            result = {"case": case, "plan": plan, **conclude(per_rank[0])}
            low, high = result["ratio_quartiles"]
            print(
                f"{case:16} {plan:12} {result['step_ms']:6.2f} ms {result['ratio']:8.4f} ({low:.4f}..{high:.4f}) "
                f"{result['sentinel_ms']:10.2f} ms {result['share_at_default']:8.2%} "
                f"| {result['direct_every_us']:10.0f} us {result['direct_sentinel_ms']:6.2f} ms "
                f"{result['direct_share_at_default']:7.2%}",
                flush=True,
            )
            found.append({**result, "seconds": per_rank})
            if arguments.out is not None:  # after each plan: an interrupted run keeps what it has
                text = json.dumps({"environment": environment(), "block": arguments.block, "results": found}, indent=1)
                arguments.out.write_text(text + "\n")
    return int(any(result["direct_share_at_default"] > BOUND for result in found))


if __name__ == "__main__":
    sys.exit(main())
