"""Host time of a cast by autocast over that of the mean operator: tiny blocks, so that kernels take next to nothing.

python -m benchmarks.planner.cast_times --out benchmarks/planner/results/cast_times.json

Blocks are those of the probe. Under autocast parameters and norms' results in fp32 are cast, three tensors a block; the same
block in bfloat16 throughout runs the same kernels without these casts. The three run in turns, and of each the shortest of 100
runs counts: other programs only make a run longer. Five times.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.surroundings import environment
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = 16
OPERATORS = 4
CASTS = 3
ROUNDS = 5
RUNS = 100


class Block(nn.Module):
    """Four operators with the views around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        heads = self.linear(self.norm(values)).view(2, 4, 2, 4).transpose(1, 2)
        return values + F.gelu(heads).transpose(1, 2).reshape(2, 4, 8)


def shortest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each call, which run in turns [s]."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(RUNS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def measure() -> dict[str, float]:
    """Return the time of an operator and of a cast, forward and backward together, and their ratio."""
    plain = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    small = copy.deepcopy(plain).bfloat16()
    values = torch.randn(2, 4, 8, requires_grad=True)
    small_values = values.detach().bfloat16().requires_grad_()

    def cast() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(values)

    both = shortest(
        {
            "fp32": lambda: plain(values).sum().backward(),
            "bf16": lambda: small(small_values).sum().backward(),
            "autocast": lambda: cast().sum().backward(),
        }
    )
    operator_s = both["fp32"] / BLOCKS / OPERATORS
    cast_s = (both["autocast"] - both["bf16"]) / BLOCKS / CASTS
    return {"operator_s": operator_s, "cast_s": cast_s, "ratio": cast_s / operator_s}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [measure() for _ in range(ROUNDS)]
    for one in rounds:
        print(f"operator {one['operator_s'] * 1e6:.1f} us, cast {one['cast_s'] * 1e6:.1f} us, ratio {one['ratio']:.2f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"environment": environment(), "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
