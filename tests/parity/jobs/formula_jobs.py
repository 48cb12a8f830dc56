"""Functions that ranks import: what a step sends by the ledger's count, and by the formulas of a comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import losses
from torch import Tensor, nn

import gpt
import meshwright as mw
from meshwright.comm.communicator import Communicator
from meshwright.comm.compression.choose import make_reducer
from meshwright.comm.compression.reducer import GradientSpec
from meshwright.comm.ledger import Ledger
from meshwright.compare.trial import learn_step

VOCABULARY = 64


def build_gpt(hidden_size: int = 64, tie_embeddings: bool = True) -> nn.Module:
    return gpt.build_gpt(
        vocabulary_size=VOCABULARY,
        max_length=16,
        num_layers=4,
        num_heads=4,
        hidden_size=hidden_size,
        tie_embeddings=tie_embeddings,
    )


class Skips(nn.Module):
    """What the first layer gives is needed by all others; a table without samples, too; and one layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.table = Table()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids)
        positions, mask = self.table(ids)
        for index in (0, 1, 2, 1):
            x = torch.relu(self.layers[index](x + positions)) + first * mask.unsqueeze(-1)
        return self.head(x)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[: ids.shape[1]], ids > 3


class Doubling(nn.Linear):
    """Reads a number inside of a layer, which only its own stage has."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2.0 if input.sum().item() > 0 else 1.0)


def build_numbers() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), Doubling(64, 64), nn.Linear(64, VOCABULARY))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "gpt": build_gpt,
    "gpt_untied": functools.partial(build_gpt, tie_embeddings=False),
    "gpt_wide": functools.partial(build_gpt, hidden_size=128),
    "skips": Skips,
    "numbers": build_numbers,
}


def language(num_samples: int, seed: int = 0) -> Any:
    ids = torch.randint(VOCABULARY, (num_samples, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def sent_and_formula(name: str, plan: str, num_samples: int = 8) -> tuple[float, float | None]:
    """Return what this rank sent in a step that is not the first, and what the formula says."""
    model = mw.apply_plan(
        BUILD[name], plan, loss_fn=losses.cross_entropy, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)
    )
    share = mw.split_batch(language(num_samples), model)
    forecast = model.engine.forecast()
    with model:
        model.step(share)
        forecast.end_watching()
        for _ in range(2):  # the first steps compare buffers besides
            model.step(share)
        before = model.ledger.sent_bytes
        model.step(share)
        sent = model.ledger.sent_bytes - before
        learn_step(forecast, model, share, num_samples, is_cross_entropy=True)
    return sent, forecast.sent_bytes()


def payloads(compress: str) -> tuple[int, int]:
    """Return what the gradients of a matrix of 256 x 64 and of a vector of 256 are sent as [bytes]."""
    alone = Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)
    reducer = make_reducer(compress, alone)
    of = [GradientSpec.of("weight", torch.empty(shape)) for shape in ((256, 64), (256,))]
    matrix, vector = (reducer.payload_bytes(spec, torch.float32) for spec in of)
    return matrix, vector
