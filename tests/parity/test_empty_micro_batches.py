"""Micro-batches in which nothing counts still run: their forward moves BatchNorm's statistics, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tolerances import FLOAT64
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright import testing

NUM_SAMPLES, WIDTH, NUM_LABELS = 8, 6, 5
EMPTY = {2, 3}  # a micro-batch of its own in every cut below


class Labelled(nn.Module):
    """Layers with BatchNorm between, and the mean over labels that count as the model's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, NUM_LABELS)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs = layer(inputs)
        logits = self.head(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class WithoutLogits(Labelled):
    """The same, which returns the loss alone."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(inputs, labels)["loss"]}


class Masked(Labelled):
    """A mean of the model's own over what counts, and no other output: 0 / 0 where nothing does, and so are its gradients."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        counts = (labels >= 0).double()
        logits = super().forward(inputs, labels)["logits"]
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return {"loss": (losses * counts).sum() / counts.sum()}


def _build(kind: type[Labelled] = Labelled) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def _batch(step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    labels = torch.randint(NUM_LABELS, (NUM_SAMPLES,), generator=source)
    if step:  # the first batch is as any other; what is empty comes later
        labels[sorted(EMPTY)] = -100
    return {"inputs": torch.randn(NUM_SAMPLES, WIDTH, generator=source, dtype=torch.float64), "labels": labels}


def _shares(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, rows, strict=True))
        for rows in zip(*(each.chunk(parts) for each in batch.values()), strict=True)
    ]


def _expected(num_shares: int) -> dict[str, Any]:
    """Train with one device in the pieces that micro-batches of two samples are; statistics are those of rank 0's pieces."""
    module = _build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(3):
        batch = _batch(step)
        count = int((batch["labels"] != -100).sum())
        optimizer.zero_grad()
        total = 0.0
        start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for rank, share in enumerate(_shares(batch, num_shares)):
            for name, buffer in module.named_buffers():
                buffer.copy_(start[name])
            for piece in _shares(share, NUM_SAMPLES // num_shares // 2):
                summed = F.cross_entropy(module(**piece)["logits"], piece["labels"], reduction="sum") / count
                summed.backward()
                total += float(summed.detach())
            if rank == 0:
                kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
        optimizer.step()
        found.append(total)
    return {"losses": found, "state": {name: value.clone() for name, value in module.state_dict().items()}}


def _found(line: str, kind: type[Labelled]) -> dict[str, Any]:
    plan = mw.Plan.parse(line)
    module = _build(kind)
    model = mw.apply_plan(module, plan, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    found = []
    for step in range(3):
        share = _shares(_batch(step), plan.dp)[model.dp_rank] if plan.dp > 1 else _batch(step)
        found.append(model.step(share).loss)
    state = model.full_state_dict()
    return {"losses": found, "state": {name: value.clone() for name, value in state.items()}}


@pytest.mark.parametrize(
    ("line", "ranks", "kind"),
    [
        ("micro_batches=4", 1, Labelled),
        ("micro_batches=4", 1, WithoutLogits),
        ("micro_batches=4", 1, Masked),
        ("dp=2,zero=3,micro_batches=2", 2, Masked),
        ("pp=2,micro_batches=4", 2, Masked),
        ("dp=2,micro_batches=2", 2, Labelled),
        ("dp=2,zero=3,micro_batches=2", 2, Labelled),
        ("pp=2,micro_batches=4", 2, Labelled),
        ("pp=2,micro_batches=4,schedule=zb-h1", 2, Labelled),
        ("tp=2,micro_batches=4", 2, Labelled),
    ],
)
def test_statistics_see_what_does_not_count(line: str, ranks: int, kind: type[Labelled]) -> None:
    expected = _expected(2 if line.startswith("dp") else 1)
    for found in testing.run_ranks(_found, ranks, line, kind):
        assert found["losses"] == pytest.approx(expected["losses"], rel=FLOAT64)
        for name, value in found["state"].items():
            assert torch.allclose(value, expected["state"][name], rtol=1e-11, atol=1e-12), name
