"""Time of a GPT's start and steps with `rng="global"` beside `rng="torch"`, without dropout and with a tenth of it, on a CPU.

python benchmarks/randomness/steps.py --out FILE

Both ways take their steps in turn; the figure is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshwright as mw
from surroundings import environment  # pyright: ignore[reportMissingImports]

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, SAMPLES = 512, 64, 128, 4, 4, 8
WAYS: tuple[Literal["torch", "global"], ...] = ("torch", "global")


class Block(nn.Module):
    """A block with dropout on attention, on both results and inside of the MLP."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        size, length, _ = x.shape
        q, k, v = (part.view(size, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(size, length, -1)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm_2(x))))))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(p) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.drop = nn.Dropout(p)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [samples, length, vocabulary]."""
        return self.head(self.blocks(self.drop(self.tokens(ids) + self.places.weight)))


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def measure(p: float, plan: str, starts: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of starts (`apply_plan` and the first step) and of steps, and ratios of neighbours."""
    batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH)), torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    times: dict[str, dict[str, list[float]]] = {way: {"start": [], "step": []} for way in WAYS}
    models: dict[str, Any] = {}
    for number in range(starts):
        for way in WAYS if number % 2 else WAYS[::-1]:
            if way in models:
                models[way].close()
            begin = time.perf_counter()
            models[way] = mw.apply_plan(
                lambda: Gpt(p), plan, loss_fn=loss_fn, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01), rng=way
            )
            models[way].step(batch)
            times[way]["start"].append(1e3 * (time.perf_counter() - begin))
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            begin = time.perf_counter()
            models[way].step(batch)
            times[way]["step"].append(1e3 * (time.perf_counter() - begin))
    row: dict[str, Any] = {"dropout": p, "plan": plan}
    for kind in ("start", "step"):
        pairs = list(zip(times["torch"][kind], times["global"][kind], strict=True))[1 if kind == "start" else 3 :]
        ratios = [by_place / by_torch for by_torch, by_place in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[kind] = {
            "torch_ms": statistics.median(by_torch for by_torch, _ in pairs),
            "global_ms": statistics.median(by_place for _, by_place in pairs),
            "ratio": middle,
            "quartiles": [low, high],
            "pairs_ms": pairs,
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--starts", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(p, plan, arguments.starts, arguments.rounds)
        for p in (0.0, 0.1)
        for plan in ("single", "micro_batches=2")
    ]
    found = {"environment": environment(), "load": os.getloadavg(), "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        for kind in ("start", "step"):
            part = row[kind]
            print(
                f"{row['dropout']} {row['plan']:16s} {kind:5s} {part['torch_ms']:8.2f} ms -> {part['global_ms']:8.2f} ms, "
                f"ratio {part['ratio']:.3f} {part['quartiles']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
