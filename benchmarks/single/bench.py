"""A step of the plan `single` beside the same step of a plain PyTorch loop, alternating in one process.

python benchmarks/single/bench.py --device cuda --rounds 40 --out results/single_h200_202611.json
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
from torch import nn

import meshwright as mw

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "examples")]
from peers.cases import loss_fn, optimizer_of  # noqa: E402
from surroundings import environment  # noqa: E402

SIZES = {
    # name: hidden size, layers, sequences, tokens a sequence
    "0.8M": (128, 4, 8, 64),
    "4.9M": (256, 6, 16, 128),
    "25.4M": (512, 8, 4, 32),
    "302M": (1024, 24, 8, 512),
}
VOCABULARY = 256


def build(name: str) -> nn.Module:
    """Return a GPT of the named size."""
    import gpt

    hidden, layers, _, tokens = SIZES[name]
    heads = hidden // 32 if hidden < 1024 else hidden // 64
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    return gpt.build_gpt(**sizes, vocabulary_size=VOCABULARY, max_length=max(tokens, 128), tie_embeddings=True)


def plain_step(model: nn.Module, clip: float | None) -> Callable[[Any], float]:
    """Return one step of a textbook loop: the loss is read, as `step` returns it."""
    optimizer = optimizer_of("adamw-fused")(model.parameters())

    def step(batch: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


def seconds_of(step: Callable[[Any], Any], batch: Any, steps: int, device: torch.device) -> float:
    """Return the seconds a step takes, over several in a row [s]."""
    start = time.perf_counter()
    for _ in range(steps):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def measure(name: str, device: torch.device, rounds: int, clip: float | None) -> dict[str, Any]:
    """Return both sides' seconds a step, and the ratios of neighbours."""
    _, _, sequences, tokens = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (sequences, tokens + 1), generator=generator).to(device)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    theirs = plain_step(build(name).to(device), clip)
    ours = mw.apply_plan(
        lambda: build(name),
        "single",
        loss_fn=loss_fn,
        optimizer=optimizer_of("adamw-fused"),
        max_grad_norm=clip,
        devices=[device],
    )
    sides = {"plain": theirs, "single": ours.step}
    losses = {
        side: [float(getattr(r, "loss", r)) for r in (step(batch) for _ in range(5))] for side, step in sides.items()
    }
    steps = 20 if name != "302M" else 5
    seconds: dict[str, list[float]] = {"plain": [], "single": []}
    for index in range(rounds):
        for side in ("plain", "single") if index % 2 else ("single", "plain"):
            seconds[side].append(seconds_of(sides[side], batch, steps, device))
    ratios = [mine / other for mine, other in zip(seconds["single"], seconds["plain"], strict=True)]
    ours.close()
    return {"seconds": seconds, "ratios": ratios, "losses": losses}


def main() -> None:
    """Measure all sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: dict[str, Any] = {}
    for name in options.sizes:
        for clip in (None, 1.0):
            row = measure(name, device, options.rounds, clip)
            rows[f"{name}, clip={clip}"] = row
            quartiles = statistics.quantiles(row["ratios"], n=4)
            print(
                f"{name:>6} clip={clip!s:>4}  plain {1e3 * statistics.median(row['seconds']['plain']):8.3f} ms  "
                f"single/plain {quartiles[1]:.4f} ({quartiles[0]:.4f}, {quartiles[2]:.4f})  "
                f"losses equal: {row['losses']['plain'] == row['losses']['single']}",
                flush=True,
            )
    where = environment() | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": where, "rows": rows}))


if __name__ == "__main__":
    main()
