"""Models that people name, as their libraries build them, under plans against one plain loop.

python benchmarks/fuzz/named_models.py --out benchmarks/fuzz/results/named_models.json

torchvision's ResNet18 (GroupNorm, BatchNorm), a CNN whose activations write in place, experts that keep their auxiliary loss
on the block, and Mixtral from a configuration. Each is trained for some steps in float64 under every plan, or refused. What
`BatchNorm` computes depends on the samples it sees: where a plan cuts the batch, the reference runs in the same shares.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from tests.parity.models import hf_models  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright import testing  # noqa: E402
from surroundings import environment  # noqa: E402

STEPS, SAMPLES, CLASSES = 3, 4, 5
PLANS = {
    "pp=2": 2,
    "pp=2,micro_batches=2": 2,
    "pp=2,micro_batches=4,schedule=zb-h1": 2,
    "tp=2": 2,
    "tp=2,pp=2": 4,
    "tp=2,pp=2,micro_batches=2": 4,
}


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _torchvision() -> Any:
    """Return torchvision's models; its compiled operators, which no model here uses, may be of another build."""
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models  # pyright: ignore[reportMissingImports]

    return models


@functools.cache
def _library() -> Any:
    return _torchvision()


def resnet18(norm: str) -> nn.Module:
    """Return ResNet18; images of 64 x 64 leave its last BatchNorm four values a sample."""
    models = _library()
    layer = functools.partial(nn.GroupNorm, 8) if norm == "group" else nn.BatchNorm2d
    return models.resnet18(norm_layer=layer, num_classes=CLASSES)


class InPlaceCnn(nn.Module):
    """Blocks that begin with an activation which writes over what the block before has given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(1, b))
            for a, b in ((6, 10), (10, 7), (7, 9), (9, 8))
        )
        self.last = nn.LeakyReLU(0.1, inplace=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x).mean((2, 3)))


class Experts(nn.Module):
    """Two experts of four for each token; the balance loss is left on the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width)) for _ in range(4)
        )
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        self.aux = (weights.mean(1) ** 2).sum(-1).mean()
        best = weights.topk(2, dim=-1)
        gates = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
        return x + sum(expert(x) * gates[..., i : i + 1] for i, expert in enumerate(self.experts))


class MixtureOfExperts(nn.Module):
    """Blocks of experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(29, 10)
        self.blocks = nn.ModuleList(Experts(10) for _ in range(4))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def with_aux(module: nn.Module) -> Callable[[Any, Any], Tensor]:
    def loss(outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1]) + 0.01 * sum(block.aux for block in module.blocks)  # pyright: ignore

    return loss


def plain_loss(_: nn.Module) -> Callable[[Any, Any], Tensor]:
    return lambda outputs, batch: F.cross_entropy(outputs, batch[1])


def own_loss(_: nn.Module) -> None:
    """Mixtral computes its own."""


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "ResNet18, GroupNorm": (functools.partial(resnet18, "group"), plain_loss, "images"),
    "ResNet18, BatchNorm": (functools.partial(resnet18, "batch"), plain_loss, "images"),
    "CNN, in place": (InPlaceCnn, plain_loss, "images"),
    "experts with aux": (MixtureOfExperts, with_aux, "words"),
    "Mixtral": (hf_models.build_mixtral, own_loss, "labelled"),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batch_of(kind: str, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    if kind == "images":
        return torch.randn(SAMPLES, 3, 64, 64, generator=generator, dtype=torch.float64), labels
    ids = torch.randint(29, (SAMPLES, 7), generator=generator)
    return {"input_ids": ids, "labels": ids} if kind == "labelled" else (ids, labels)


def parts_of(batch: Any, count: int) -> list[Any]:
    """Return the batch in equal micro-batches."""
    if isinstance(batch, dict):
        chunks = {key: value.chunk(count) for key, value in batch.items()}
        return [{key: chunks[key][i] for key in batch} for i in range(count)]
    return list(zip(*(value.chunk(count) for value in batch), strict=True))


Seen = tuple[list[float], dict[str, Tensor], dict[str, Tensor], str]
"""Losses, the last gradients, the state at the end, and what the plan left whole."""


def train(name: str, plan: str) -> Seen:
    """Train under a plan."""
    _, make_loss, kind = MODELS[name]
    model = build(name)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    with mw.apply_plan(model, plan, seed=0, loss_fn=make_loss(model), optimizer=sgd) as applied:
        losses = [applied.step(batch_of(kind, step)).loss for step in range(STEPS)]
        gradients = {key: value for key, value in applied.full_gradients().items() if value is not None}
        return losses, gradients, applied.full_state_dict(), "; ".join(applied.plan.reasons)


def train_plainly(name: str, micro_batches: int) -> Seen:
    """Train in a plain loop, whose batches are cut into as many micro-batches."""
    _, make_loss, kind = MODELS[name]
    model = build(name)
    loss_fn = make_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in parts_of(batch_of(kind, step), micro_batches):
            value = model(**part).loss if loss_fn is None else loss_fn(model(part[0]), part)
            (value / micro_batches).backward()
            total += value.item() / micro_batches
        optimizer.step()
        losses.append(total)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, model.state_dict(), ""


def difference(found: Seen, expected: Seen) -> float:
    """Return the largest difference of a loss, a gradient or a tensor of the state, relative to its largest entry."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True))
    for mine, right in ((found[1], expected[1]), (found[2], expected[2])):
        if mine.keys() != right.keys():
            return float("inf")
        for key, value in right.items():
            scale = max(value.double().abs().max().item(), 1e-12)
            worst = max(worst, (mine[key].double() - value.double()).abs().max().item() / scale)
    return worst


def run_cell(name: str, plan: str) -> dict[str, Any]:
    """Train a model under a plan and beside it; return the verdict."""
    num_micro_batches = mw.Plan.parse(plan).micro_batches
    row: dict[str, Any] = {"model": name, "plan": plan}
    outcomes = testing.run_outcomes(train, PLANS[plan], name, plan)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        first = errors[0]
        is_refused = len(errors) == len(outcomes) and all(getattr(error, "fix", None) for error in errors)
        return row | {"verdict": "refused" if is_refused else "crashed", "text": str(first)}
    expected = train_plainly(name, num_micro_batches)
    worst = max(difference(outcome.result, expected) for outcome in outcomes)
    return row | {"verdict": "equal" if worst < 1e-9 else "WRONG", "largest": worst, "text": outcomes[0].result[3]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = []
    for name in (name for name in MODELS if arguments.only in name):
        for plan in PLANS:
            rows.append(run_cell(name, plan))
            print(
                f"{name:22s} {plan:38s} {rows[-1]['verdict']:8s} {rows[-1].get('largest', 0):.1e} {rows[-1]['text'][:150]}"
            )
    if arguments.out is not None:
        record = {"date": datetime.date.today().isoformat(), "environment": environment(), "cells": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(row["verdict"] in ("WRONG", "crashed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
