"""How long a save in the background stops training: our `in_background=True` beside torch's `async_save`, on two ranks.

    python benchmarks/checkpoint/stall.py --directory DIR --out benchmarks/checkpoint/results/stall.json

Both have the same state, of parameters and AdamW's two moments, whole on both ranks (data parallelism). Each run saves several
times and waits for the disk between two saves; the time of the call is what training would wait. Runs of both sides alternate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from surroundings import environment

LAYER = 2048


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


def ours(num_layers: int, directory: str, saves: int) -> list[float]:
    """Return the seconds of each call."""
    torch.set_num_threads(1)
    model = mw.apply_plan(lambda: Stack(num_layers), "dp=2", loss_fn=loss_fn, optimizer=torch.optim.AdamW, seed=0)
    batch = torch.randn(2, LAYER), torch.randn(2, LAYER)
    model.step(mw.split_batch(batch, model))
    seconds = []
    for number in range(saves):
        start = time.perf_counter()
        mw.save_checkpoint(model, directory, step=number, in_background=True, keep=1)
        seconds.append(time.perf_counter() - start)
        mw.wait_for_checkpoint(model)
    return seconds


def theirs(num_layers: int, directory: str, saves: int) -> list[float]:
    """Return the seconds of each call of torch's async_save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    world = mw.join_world()
    group = dist.new_group(backend="gloo")
    model = Stack(num_layers)
    state = {"model": dict(model.named_parameters()), "optimizer": {}}
    for name, parameter in model.named_parameters():
        state["optimizer"][name] = {key: torch.randn_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    seconds = []
    for number in range(saves):
        dist.barrier(group)
        start = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=f"{directory}/{number}", process_group=group)
        seconds.append(time.perf_counter() - start)
        future.result()
        if world.rank == 0 and number:
            shutil.rmtree(f"{directory}/{number - 1}")
    return seconds


def main() -> int:
    """Alternate both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="the state of one rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    num_layers = max(1, given.mib * 2**20 // (3 * 4 * LAYER * LAYER))
    rows = []
    for number in range(given.rounds):
        sides = {"ours": ours, "dcp": theirs}
        row = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(dir=given.directory) as folder:
                ranks = mw.launch(sides[name], 2, num_layers, folder, given.saves)
            # Of each save the slower rank counts; the first one of a run makes memory, the others find it.
            row[name] = [max(pair) for pair in zip(*ranks, strict=True)]
        row["first"] = row["ours"][0] / row["dcp"][0]
        row["later"] = statistics.median(row["ours"][1:]) / statistics.median(row["dcp"][1:])
        print(json.dumps(row), flush=True)
        rows.append(row)
    ratios = {key: sorted(row[key] for row in rows) for key in ("first", "later")}
    for key, found in ratios.items():
        print(f"{key} saves, ours / dcp: median {statistics.median(found):.3f}, {found[0]:.3f} to {found[-1]:.3f}")
    if given.out:
        given.out.write_text(json.dumps({**environment(), "mib": given.mib, "rounds": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
