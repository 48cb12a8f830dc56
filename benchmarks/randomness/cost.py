"""Time of dropout with draws by place beside torch's own, forward and backward, on a CPU.

python benchmarks/randomness/cost.py --out FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.operators import install_operators
from meshwright.apply.randomness.row_choices import watch_choices
from meshwright.apply.randomness.sample_dims import SiteDims
from meshwright.apply.randomness.sites import Names, StepDraws, in_forward, in_step
from surroundings import environment  # pyright: ignore[reportMissingImports]

SHAPES = [(8, 64, 64), (8, 128, 512), (8, 512, 1024), (32, 12, 128, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ROUNDS = 30


class Dropping(nn.Module):
    """One dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, of which a tenth is left out."""
        return F.dropout(x, 0.1)


class Chain(nn.Module):
    """A block's share of dropout beside its products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after the block."""
        return x + self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Experts(nn.Module):
    """Eight experts, two for each token: rows that an index chooses, with two dropouts in each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 8), nn.ModuleList(Chain(width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after the experts."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return x + result.view(x.shape)


class Edges(nn.Module):
    """Dropout on four numbers for each of many edges, whose rows are short."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("source", torch.randint(0, 2000, (20000,)).sort().values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return sums over nodes."""
        nodes = x.flatten(0, 1)
        edges = F.dropout(nodes.index_select(0, self.source), 0.1)
        return torch.zeros_like(nodes).index_add(0, self.source, edges)


def step(module: nn.Module, x: torch.Tensor, *, draws: bool) -> float:
    """Return the seconds of a forward and a backward."""
    start = time.perf_counter()
    if draws:
        with in_step(StepDraws("0/step/0", Names(module), CHOSEN.get(type(module), DIMS))):
            with in_forward(ForwardDraws(0, x.shape[0])):
                out = module(x)
            out.sum().backward()
    else:
        module(x).sum().backward()
    return time.perf_counter() - start


DIMS = {(name, number): SiteDims(0) for name in ("", "drop") for number in range(2)}
FOLLOWS = SiteDims(0, num_dims=2, is_merged=True, follows="")
CHOSEN: dict[type, dict[Any, SiteDims]] = {
    Experts: {(f"experts.{place}.drop", number): FOLLOWS for place in range(8) for number in range(2)},
    Edges: {("", 0): FOLLOWS},
}


def compare(module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Return both times and their ratio, of rounds in which both sides take turns."""
    sides: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS + 3):
        for draws in (False, True) if number % 2 else (True, False):
            seconds = step(module, x, draws=draws)
            if number >= 3:
                sides[draws].append(seconds)
    ratios = sorted(ours / theirs for ours, theirs in zip(sides[True], sides[False], strict=True))
    return {
        "torch_s": statistics.median(sides[False]),
        "by_place_s": statistics.median(sides[True]),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def idle() -> dict[str, Any]:
    """Return the times of a model that draws nothing, outside and inside of a step that would draw by place."""
    module = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))
    return compare(module, torch.randn(16, 64, requires_grad=True))


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    install_operators()
    rows: list[dict[str, Any]] = []
    make: list[tuple[str, Callable[[], nn.Module]]] = [("dropout", Dropping), ("block", lambda: Chain(512))]
    for name, build in make:
        for dtype in DTYPES if name == "dropout" else [torch.float32]:
            for shape in SHAPES if name == "dropout" else [(8, 128, 512)]:
                x = torch.randn(shape, dtype=dtype, requires_grad=True)
                rows.append({"what": name, "shape": list(shape), "dtype": str(dtype)} | compare(build(), x))
                row = rows[-1]
                print(name, shape, dtype, f"{row['torch_s'] * 1e6:.0f} us", f"{row['ratio']:.3f}", row["quartiles"])
    watch_choices()
    for name, module, shape in (("experts", Experts(256), (4, 128, 256)), ("edges", Edges(), (8, 250, 4))):
        row = compare(module, torch.randn(shape, requires_grad=True))
        rows.append({"what": name, "shape": list(shape), "dtype": "torch.float32"} | row)
        print(name, shape, f"{row['torch_s'] * 1e6:.0f} us", f"{row['ratio']:.3f}", row["quartiles"])
    rows.append({"what": "nothing drawn", "shape": [16, 64], "dtype": "torch.float32"} | idle())
    print(rows[-1])
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
