"""All pairs of plans: saved under A, loaded and saved under B, loaded and saved under A again; every tensor compared bit by bit.

    python benchmarks/checkpoint/pairs.py --out benchmarks/checkpoint/results/pairs.json

A small transformer in float64 with a tied head, trained two steps under A. What is compared is read from the files: parameters,
buffers, the optimizer's tensors and numbers. Exit status 1 where one pair differs in one bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from surroundings import environment

PLANS = (
    "single",
    "dp=3",
    "dp=2,zero=1",
    "dp=3,zero=2",
    "dp=2,zero=3,whole_below=1",
    "dp=4,zero=3,shard=2",
    "tp=2",
    "tp=3",
    "dp=2,tp=2,zero=1",
    "pp=2,schedule=gpipe,micro_batches=2",
    "pp=2,schedule=1f1b,micro_batches=3",
    "pp=2,schedule=interleaved,virtual=2,micro_batches=2",
    "pp=2,schedule=zb-h1,micro_batches=2",
    "pp=2,schedule=zbv,micro_batches=4",
    "pp=2,tp=2,micro_batches=2",
    "dp=2,pp=2,zero=2,micro_batches=2",
)
OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


class Block(nn.Module):
    """Attention with heads and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(24), nn.LayerNorm(24)])
        self.attention = nn.MultiheadAttention(24, 6, batch_first=True)
        self.up, self.down = nn.Linear(24, 54), nn.Linear(54, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Four blocks between a tied embedding and head."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 24)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return one batch of 7 samples, which no number of ranks here divides."""
    tokens = torch.randint(0, 31, (7, 5), generator=torch.Generator().manual_seed(number))
    return tokens, tokens.roll(1, 1)


def loss_fn(outputs: Tensor, pair: Any) -> Tensor:
    """Return the mean over all tokens."""
    return nn.functional.cross_entropy(outputs.reshape(-1, 31), pair[1].reshape(-1))


def apply(plan: str, optimizer: str) -> mw.ParallelModel:
    """Return the model, cut."""
    torch.set_num_threads(1)
    return mw.apply_plan(
        lambda: Model().double(),
        plan,
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS[optimizer],
        seed=0,
        example_batch=batch(99),
    )


def train_and_save(plan: str, optimizer: str, target: str) -> None:
    """Train two steps and save."""
    model = apply(plan, optimizer)
    for number in range(2):
        model.step(mw.split_batch(batch(number), model))
    mw.save_checkpoint(model, target, step=2)


def resave(plan: str, optimizer: str, pairs: list[tuple[str, str]]) -> None:
    """Load each source and save it again."""
    model = apply(plan, optimizer)
    for source, target in pairs:
        mw.save_checkpoint(model, target, step=mw.load_checkpoint(model, source))


def run(function: Any, plan: str, *args: Any) -> None:
    """Run a job on the plan's ranks."""
    ranks = mw.Plan.parse(plan).num_ranks
    mw.launch(function, ranks, plan, *args)


def differences(left: Path, right: Path) -> list[str]:
    """Return the names of what differs in two directories' newest checkpoints."""
    with OpenCheckpoint(Store(left).saved()[0].path) as mine, OpenCheckpoint(Store(right).saved()[0].path) as other:
        kept = [
            {name for name in opened.manifest.tensors if name.startswith(("model/", "optimizer/"))}
            for opened in (mine, other)
        ]
        found = sorted(kept[0] ^ kept[1])
        found += [name for name in sorted(kept[0] & kept[1]) if not torch.equal(mine.read(name), other.read(name))]
        same = mine.manifest.state["optimizer"] == other.manifest.state["optimizer"]
        return found if same else [*found, "the optimizer's numbers"]


def main() -> int:
    """Run all pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], action="append")
    parser.add_argument("--plans", default=";".join(PLANS))
    given = parser.parse_args()
    plans = [plan.strip() for plan in given.plans.split(";")]
    rows, start = [], time.time()
    for optimizer in given.optimizer or OPTIMIZERS:
        # Adafactor needs whole matrices, which tp together with ZeRO does not have: refused when the plan is applied.
        own = [plan for plan in plans if optimizer == "adamw" or not ("tp=" in plan and "zero=" in plan)]
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for a, plan in enumerate(own):
                run(train_and_save, plan, optimizer, str(place / f"{a}"))
            for b, plan in enumerate(own):
                run(resave, plan, optimizer, [(str(place / f"{a}"), str(place / f"{a}-{b}")) for a in range(len(own))])
            for a, plan in enumerate(own):
                pairs = [(str(place / f"{a}-{b}"), str(place / f"{a}-{b}-{a}")) for b in range(len(own))]
                run(resave, plan, optimizer, pairs)
                for b, other in enumerate(own):
                    found = differences(place / f"{a}", place / f"{a}-{b}-{a}") + differences(
                        place / f"{a}", place / f"{a}-{b}"
                    )
                    rows.append({"optimizer": optimizer, "a": plan, "b": other, "differ": found})
                    if found:
                        print(f"{optimizer}: {plan} -> {other} -> {plan}: {len(found)} differ, {found[:3]}", flush=True)
        count = sum(row["optimizer"] == optimizer for row in rows)
        print(f"{optimizer}: {count} pairs of {len(own)} plans", flush=True)
    wrong = [row for row in rows if row["differ"]]
    print(f"{len(rows)} pairs, {len(wrong)} differ, {time.time() - start:.0f} s")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        counts = {name: sum(row["optimizer"] == name for row in rows) for name in OPTIMIZERS}
        record = {**environment(), "plans": plans, "pairs": counts, "differ": wrong}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
