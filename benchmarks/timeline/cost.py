"""What a traced step costs, and what hooks cost in a step that is not traced; adds to results/cost.json.

python benchmarks/timeline/cost.py CASE... [--seconds S] [--pool]    a case is a row of CASES by its number

With --pool the rounds are added to those that results/cost.json has of the case.

Within one run, steps of four kinds come in turn, in each round in another order:

    off      nothing recorded
    on       recorded
    on x20   recorded, each record made 20 times over
    off x50  not recorded, each hook called 50 times over

All ranks take the same kind, after a barrier. A ratio is a kind over "off" of the same round. The cost of one record is a
twentieth of what "on x20" adds, that of one hook a fiftieth: so a cost far below the noise of a step is seen.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "examples")]

import torch  # noqa: E402

import meshwright as mw  # noqa: E402
from gpt import build_gpt  # noqa: E402
from meshwright.comm.communicator import Communicator  # noqa: E402
from meshwright.comm.ledger import Ledger  # noqa: E402
from meshwright.comm.spans import SpanRecorder  # noqa: E402
from meshwright.run.parallel_model import ParallelModel  # noqa: E402
from meshwright.spec.plan import Plan  # noqa: E402

KINDS = ("off", "on", "on x20", "off x50")
MORE_RECORDS, MORE_HOOKS = 20, 50
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_length": 16}
SMALL = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "max_length": 64}
MIDDLE = {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "max_length": 64}
CASES = (
    ("gpt, 35 k", "single", TINY),
    ("gpt, 35 k", "dp=2", TINY),
    ("gpt, 35 k", "tp=2", TINY),
    ("gpt, 35 k", "pp=2,micro_batches=4", TINY),
    ("gpt, 0.8 M", "single", SMALL),
    ("gpt, 0.8 M", "dp=2", SMALL),
    ("gpt, 0.8 M", "dp=2,zero=3,whole_below=0B", SMALL),
    ("gpt, 0.8 M", "tp=2", SMALL),
    ("gpt, 0.8 M", "pp=2,micro_batches=4", SMALL),
    ("gpt, 0.8 M", "data_parallel", SMALL),
    ("gpt, 0.8 M", "model_parallel", SMALL),
    ("gpt, 4.9 M", "tp=2", MIDDLE),
    ("gpt, 4.9 M", "pp=2,micro_batches=8", MIDDLE),
)
SAMPLES = 8
MOST_STEPS = 100
"""Steps that one recorder sees, as in a run."""


class Repeating(SpanRecorder):
    """Makes each record 20 times; one of them is kept by `spans`, the others by lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [SpanRecorder() for _ in range(MORE_RECORDS - 1)]
        clock = self.now

        def now() -> int:
            for _ in range(MORE_RECORDS - 1):
                clock()
            return clock()

        self.now = now

    def add(self, kind: str, name: object, begin: int, details: Any = None) -> None:
        for other in self.others:
            other.add(kind, name, begin, copy.copy(details))
        super().add(kind, name, begin, details)

    def begin_flight(self, name: str, details: Any) -> Any:
        for other in self.others:
            other.begin_flight(name, details)
        return super().begin_flight(name, details)


def hooks(group_type: Any, times: int) -> None:
    """Have each hook that asks whether steps are recorded called so many times; 1: once, as it is."""
    for owner, name in ((Ledger, "span"), (group_type, "span_details"), (ParallelModel, "_recorded")):
        plain = _PLAIN.setdefault((owner, name), getattr(owner, name))
        setattr(owner, name, plain if times == 1 else _repeated(plain, times))


_PLAIN: dict[tuple[Any, str], Any] = {}


def _repeated(plain: Any, times: int) -> Any:
    @functools.wraps(plain)
    def repeated(*args: Any, **options: Any) -> Any:
        for _ in range(times - 1):
            plain(*args, **options)
        return plain(*args, **options)

    return repeated


def loss_fn(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def take_turns(plan: str, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """Take steps of all kinds in turn for so long; return the seconds and processor time of each."""
    torch.set_num_threads(1)
    ids = torch.randint(256, (SAMPLES, sizes["max_length"] + 1), generator=torch.Generator().manual_seed(0))
    pair = (ids[:, :-1], ids[:, 1:])
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    build = functools.partial(build_gpt, **sizes)
    with mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=optimizer, sentinel_every=0) as model:
        batch = mw.split_batch(pair, model)
        for _ in range(5):
            model.step(batch)
        began = time.perf_counter()
        for _ in range(4):
            model.step(batch)
        mine = max(1, round(seconds / (time.perf_counter() - began)))
        rounds = torch.tensor([mine])
        model.world.default_group.all_reduce(rounds, "max")
        return _take(model, batch, int(rounds))


def _take(model: Any, batch: Any, rounds: int) -> dict[str, Any]:
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    thread: dict[str, list[float]] = {kind: [] for kind in KINDS}
    orders = list(itertools.permutations(KINDS))
    recorders: dict[str, Any] = {"on": SpanRecorder(), "on x20": Repeating()}
    counts: list[int] = []
    for number in range(rounds):
        if number % MOST_STEPS == MOST_STEPS - 1:
            recorders = {"on": SpanRecorder(), "on x20": Repeating()}
        for kind in orders[(7 * number) % len(orders)]:
            recorder = recorders.get(kind)
            before = 0 if recorder is None else len(recorder.spans) + len(recorder.flights)
            hooks(Communicator, MORE_HOOKS if kind == "off x50" else 1)
            model.world.default_group.barrier()
            model.ledger.recorder = recorder
            began, used = time.perf_counter(), time.thread_time()
            model.step(batch)
            wall[kind].append(time.perf_counter() - began)
            thread[kind].append(time.thread_time() - used)
            model.ledger.recorder = None
            if kind == "on" and recorder is not None:
                counts.append(len(recorder.spans) + len(recorder.flights) - before)
    hooks(Communicator, 1)
    return {"wall_s": wall, "thread_s": thread, "spans": statistics.median(counts)}


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by the ranks of the sorted values, which assumes no distribution."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a binomial count of one half
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def summary(found: list[dict[str, Any]], earlier: dict[str, list[float]] | None) -> dict[str, Any]:
    """Return a case's row: the slowest rank of a round sets the step for all; `earlier` rounds are pooled with these."""
    one = found[0]
    wall = {
        kind: [max(times) for times in zip(*(rank["wall_s"][kind] for rank in found), strict=True)] for kind in KINDS
    }
    if earlier is not None:
        wall = {kind: earlier[kind] + wall[kind] for kind in KINDS}
    row: dict[str, Any] = {
        "rounds": len(wall["off"]), "step_s": statistics.median(wall["off"]), "spans": [rank["spans"] for rank in found],
        "wall_s": {kind: [round(s, 6) for s in times] for kind, times in wall.items()},
    }  # fmt: skip
    for label, times in (("ratio", wall), ("thread_ratio", one["thread_s"])):
        row[label] = {
            kind: median_with_interval([more / less for more, less in zip(times[kind], times["off"], strict=True)])
            for kind in KINDS[1:]
        }
    row["on_fraction"] = [(ratio - 1) / MORE_RECORDS for ratio in row["ratio"]["on x20"]]
    row["off_fraction"] = [(ratio - 1) / (MORE_HOOKS - 1) for ratio in row["ratio"]["off x50"]]
    return row


def measure(
    model_name: str, plan: str, sizes: dict[str, int], seconds: float, earlier: dict[str, list[float]] | None
) -> dict[str, Any]:
    if "_parallel" in plan or plan == "single":
        num_devices = 1 if plan == "single" else 2
        found = [take_turns(str(Plan.preset(plan, num_devices)), sizes, seconds)]
    else:
        ranks = Plan.parse(plan).num_ranks
        found = mw.launch(take_turns, ranks, plan, sizes, seconds, threads_per_rank=1)
    row = {"model": model_name, "plan": plan, **summary(found, earlier)}
    on, many, hooks_ = (row["ratio"][kind] for kind in KINDS[1:])
    print(
        f"{model_name} {plan}: {row['step_s'] * 1e3:.1f} ms, {max(row['spans']):.0f} spans, {row['rounds']} rounds; "
        f"on {on[0]:.4f} [{on[1]:.4f}, {on[2]:.4f}]; on x20 {many[0]:.4f} [{many[1]:.4f}, {many[2]:.4f}], "
        f"so on costs {row['on_fraction'][0]:.3%} [{row['on_fraction'][1]:.3%}, {row['on_fraction'][2]:.3%}]; "
        f"off x50 {hooks_[0]:.4f}, so hooks cost {row['off_fraction'][0]:.4%} [{row['off_fraction'][1]:.4%}, "
        f"{row['off_fraction'][2]:.4%}]; thread time on {row['thread_ratio']['on'][0]:.4f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--pool", action="store_true")
    args = parser.parse_args()
    path = HERE / "results" / "cost.json"
    kept = json.loads(path.read_text())["cases"] if path.is_file() else {}
    for number in args.cases:
        earlier = kept[str(number)]["wall_s"] if args.pool and str(number) in kept else None
        kept[str(number)] = measure(*CASES[number], args.seconds, earlier)
        facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
        data = facts | {
            "date": time.strftime("%Y-%m-%d"),
            "cases": dict(sorted(kept.items(), key=lambda one: int(one[0]))),
        }
        path.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
