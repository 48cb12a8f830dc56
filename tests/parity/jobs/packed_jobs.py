"""Training of models that pack samples of different lengths between their layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import meshwright as mw


class Tagger(nn.Module):
    """Packs what a layer gives, for a recurrence, and reads its last states or all of its steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.up = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True, bidirectional=True)
        self.mid, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.up(self.embedding(ids)).tanh()
        if self.kind == "list":
            packed = rnn.pack_sequence([row[:length] for row, length in zip(x, lengths, strict=True)], False)
        else:
            packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.rnn(packed)
        if self.kind == "states":
            return self.head(self.mid(hidden[-2:].transpose(0, 1).flatten(1)).tanh())
        padded, found = rnn.pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
        return self.head(self.mid(padded).tanh()).sum(1) / found[:, None].to(x.device)


KINDS = ("states", "steps", "list")


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Tagger(kind).double()


def _loss(outputs: Tensor, pair: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, pair[1])


def _batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    ids, lengths = torch.randint(0, 20, (6, 7), generator=generator), torch.randint(1, 8, (6,), generator=generator)
    return {"ids": ids, "lengths": lengths}, torch.randint(0, 3, (6,), generator=generator)


def train(kind: str, line: str) -> list[tuple[float, float]]:
    """Return losses and gradient norms of four steps, with other lengths in each."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(functools.partial(_build, kind), line, loss_fn=_loss, optimizer=sgd) as model:
        results = [model.step(mw.split_batch(_batch(step), model)) for step in range(4)]
        return [(result.loss, result.grad_norm) for result in results]
