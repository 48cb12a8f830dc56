"""Time that the norms of gradient pieces add to a step of an own loop under ZeRO, beside the same step without them.

    python benchmarks/sentinels/own_loop.py --plans "dp=2,zero=1; dp=2,zero=3" --out FILE.json

One model in two ranks; blocks of steps with the norms and without take turns, which comes first changes, and the ratio is that of
two blocks beside each other. What `PieceNorms` does is timed by itself as well, as "direct".
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.run import written_gradients
from meshwright.run.gradient_scales import PieceNorms

SIZES = {"small": (64, 12), "medium": (256, 12), "wide": (768, 6)}
"""Width and blocks [count] of the models."""


class _NoNorms(PieceNorms):
    def __init__(self, pieces: Any) -> None:
        del pieces

    def are_of(self, pieces: Any) -> bool:
        del pieces
        return True


class _Timed(PieceNorms):
    seconds: list[float] = []  # noqa: RUF012 - of this process

    def __init__(self, pieces: Any) -> None:
        start = time.perf_counter()
        super().__init__(pieces)
        _Timed.seconds.append(time.perf_counter() - start)


class Block(nn.Module):
    """Two products with a norm before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(size: str) -> nn.Module:
    width, num_blocks = SIZES[size]
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def run(plan: str, size: str, rows: int, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Return the seconds of each block of steps on this rank, with and without the norms."""
    torch.set_num_threads(1)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    model = mw.apply_plan(functools.partial(build, size), plan, optimizer=optimizer, seed=0)
    x = torch.randn(rows, SIZES[size][0])

    def block(kind: type[PieceNorms]) -> float:
        written_gradients.PieceNorms = kind  # type: ignore[misc]
        start = time.perf_counter()
        for _ in range(num_steps):
            model.backward(model(x).square().mean(), weight=rows)
            model.optimizer.step()
            model.optimizer.zero_grad()
        return (time.perf_counter() - start) / num_steps

    block(_Timed), block(_NoNorms)
    _Timed.seconds.clear()
    pairs: list[tuple[float, float]] = []
    for number in range(num_pairs):
        if number % 2:
            without = block(_NoNorms)
            pairs.append((block(_Timed), without))
        else:
            pairs.append((block(_Timed), block(_NoNorms)))
    model.backward(model(x).square().mean(), weight=rows)
    pieces = model._own_loop._gradients_left._pieces()
    model.close()
    return {
        "pairs": pairs,
        "direct": list(_Timed.seconds),
        "pieces": len(pieces),
        "entries": sum(piece.numel() for piece in pieces),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", default="dp=2,zero=1; dp=2,zero=2; dp=2,zero=3")
    parser.add_argument("--sizes", default="small medium")
    parser.add_argument("--rows", type=int, default=64, help="rows of each rank's batch")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    path = Path(given.out)
    table: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for size in given.sizes.split():
        for plan in (text.strip() for text in given.plans.split(";")):
            found = mw.launch(run, 2, plan, size, given.rows, given.pairs, given.steps)[0]
            ratios = sorted(with_norms / without for with_norms, without in found["pairs"])
            quarter = len(ratios) // 4
            row = {
                "plan": plan,
                "size": size,
                "rows": given.rows,
                "ratio": statistics.median(ratios),
                "quartiles": [ratios[quarter], ratios[-1 - quarter]],
                "step_s": statistics.median(without for _, without in found["pairs"]),
                "direct_s": statistics.median(found.pop("direct")),
                **found,
            }
            table.append(row)
            path.write_text(json.dumps(table, indent=1))
            print(
                f"{plan:14} {size:7} step {row['step_s'] * 1e3:.2f} ms, ratio {row['ratio']:.4f} "
                f"[{row['quartiles'][0]:.3f}, {row['quartiles'][1]:.3f}], direct {row['direct_s'] * 1e6:.0f} us, "
                f"{row['pieces']} pieces of {row['entries']} entries",
                flush=True,
            )


if __name__ == "__main__":
    main()
