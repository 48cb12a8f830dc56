"""What a save in the background costs training: our `in_background=True` beside torch's `async_save`, on two ranks.

    python benchmarks/checkpoint/stall.py --directory DIR --out benchmarks/checkpoint/results/stall.json

Both train the same model by the same steps and have the same state, of parameters and AdamW's two moments, whole on both ranks
(data parallelism). Each run saves several times. Three times are taken of each save:

- "call": until the call returns;
- "stall": the call, and what later steps wait for the save before they may change what it still reads;
- "lost": the call and the steps after it, less as many steps beside no save. It has all that a save takes from training: the
  stall, and the processor and memory that its threads use beside forward and backward.

Of each save the slower rank counts. Runs of both sides alternate.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from surroundings import environment

LAYER = 2048
KINDS = ("call", "stall", "lost")
Times = dict[str, float]


class Stack(nn.Module):
    """Square layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(LAYER, LAYER, bias=False) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(outputs: Tensor, pair: Any) -> Tensor:
    """Return a mean over samples."""
    return (outputs - pair[1]).square().mean()


def made(num_layers: int, samples: int) -> tuple[mw.ParallelModel, Callable[[], object]]:
    """Return a model that has taken two steps, and what takes one more."""
    torch.set_num_threads(1)
    model = mw.apply_plan(lambda: Stack(num_layers), "dp=2", loss_fn=loss_fn, optimizer=torch.optim.AdamW, seed=0)
    batch = mw.split_batch((torch.randn(2 * samples, LAYER), torch.randn(2 * samples, LAYER)), model)
    step = functools.partial(model.step, batch)
    step()
    step()
    return model, step


def timed(run: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of some calls, one after the other."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start


def ours(num_layers: int, samples: int, directory: str, saves: int, steps: int) -> list[Times]:
    """Return the times of each save."""
    model, step = made(num_layers, samples)
    found = []
    for number in range(saves):
        alone = timed(step, steps)
        save = functools.partial(mw.save_checkpoint, model, directory, step=number, in_background=True, keep=1)
        call = timed(save)
        saving: Any = model.saving
        beside = timed(step, steps)
        waited = getattr(saving, "waited_s", 0.0)
        found.append({"call": call, "stall": call + waited, "lost": call + beside - alone, "alone": alone})
        mw.wait_for_checkpoint(model)
    return found


def theirs(num_layers: int, samples: int, directory: str, saves: int, steps: int) -> list[Times]:
    """Return the times of each save by torch's async_save, after whose call nothing waits."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    model, step = made(num_layers, samples)
    group: Any = dist.new_group(backend="gloo")
    state: dict[str, Any] = {"model": dict(model.named_parameters()), "optimizer": {}}
    for name, parameter in model.named_parameters():
        entry: Any = model.optimizer and model.optimizer.state[parameter]
        state["optimizer"][name] = {key: entry[key] for key in ("exp_avg", "exp_avg_sq")}
    found, futures = [], []
    for number in range(saves):
        alone = timed(step, steps)
        start = time.perf_counter()
        futures.append(dcp.async_save(state, checkpoint_id=f"{directory}/{number}", process_group=group))
        call = time.perf_counter() - start
        beside = timed(step, steps)
        found.append({"call": call, "stall": call, "lost": call + beside - alone, "alone": alone})
        futures.pop().result()
        dist.barrier(group)
        if model.world.rank == 0:
            shutil.rmtree(f"{directory}/{number}")
    return found


def slower(ranks: list[list[Times]]) -> list[Times]:
    """Return each save's times on the rank where they are the longest."""
    return [{key: max(rank[key] for rank in same) for key in same[0]} for same in zip(*ranks, strict=True)]


def ratios(row: dict[str, list[Times]], kind: str) -> dict[str, float]:
    """Return ours over DCP's: of the first save of a run, which makes memory, and of the others' medians."""
    first = {side: saves[0][kind] for side, saves in row.items()}
    later = {side: statistics.median(save[kind] for save in saves[1:]) for side, saves in row.items()}
    return {"first": first["ours"] / first["dcp"], "later": later["ours"] / later["dcp"]}


def main() -> int:
    """Alternate both sides and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="the state of one rank")
    parser.add_argument("--samples", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=3, help="steps after a save that are compared with as many alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    num_layers = max(1, given.mib * 2**20 // (3 * 4 * LAYER * LAYER))
    rows = []
    for number in range(given.rounds):
        sides = {"ours": ours, "dcp": theirs}
        row: dict[str, Any] = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(dir=given.directory) as folder:
                ranks = mw.launch(sides[name], 2, num_layers, given.samples, folder, given.saves, given.steps)
            row[name] = slower(ranks)
        rows.append({**row, "ratios": {kind: ratios(row, kind) for kind in KINDS}})
        print(json.dumps(rows[-1]), flush=True)
    for kind in KINDS:
        for which in ("first", "later"):
            found = sorted(row["ratios"][kind][which] for row in rows)
            print(
                f"{kind}, {which}: ours / dcp median {statistics.median(found):.3f}, {found[0]:.3f} to {found[-1]:.3f}"
            )
    if given.out:
        options = {key: getattr(given, key) for key in ("mib", "samples", "steps")}
        given.out.write_text(json.dumps({**environment(), **options, "rounds": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
