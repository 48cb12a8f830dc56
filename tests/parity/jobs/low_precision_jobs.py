"""Models and losses in less than float32, and experts under autocast; for ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

STEPS, LR = 2, 1e-3
_WORDS, _WIDTH = 32, 32


class Words(nn.Module):
    """A bfloat16 transformer over many tokens, whose loss is rounded to bfloat16, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.words.weight)


class Mixing(Words):
    """The same, with words centred over the samples."""

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        return found - 0.3 * found.mean(0, keepdim=True)


class Asking(nn.Module):
    """A model that takes nothing but bfloat16, so that it runs under autocast alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 64), nn.Linear(64, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.up(self.words(tokens))
        assert h.dtype == torch.bfloat16, "another dtype"
        return self.down(torch.tanh(h))


class Experts(nn.Module):
    """A layer whose sizes values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        weights = self.gate(h).softmax(-1, dtype=torch.float32)
        found = torch.zeros_like(h)
        for place in (weights.argmax(-1).bincount(minlength=2) > 0).nonzero().flatten().tolist():
            rows = (weights.argmax(-1) == place).nonzero().flatten()
            found = found.index_add(0, rows, (weights[rows, place, None] * self.experts[place](h[rows])).to(h.dtype))
        return h + found


class Casting(nn.Module):
    """A model whose forward casts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, _WIDTH)
        self.layer = nn.TransformerEncoderLayer(_WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(self.layer(self.into(x).unsqueeze(1)).squeeze(1))


def experts() -> nn.Module:
    """Return layers of experts between two others."""
    return nn.Sequential(nn.Linear(6, _WIDTH), Experts(), nn.Linear(_WIDTH, _WIDTH), Experts(), nn.Linear(_WIDTH, 4))


def _loss_of(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def batch_of(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Return a batch; of words, other numbers of labels count in each sample and step."""
    generator = torch.Generator().manual_seed(step)
    if kind in ("Casting", "experts"):
        return torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)
    length = 12 if kind == "Asking" else 320
    words, labels = (torch.randint(_WORDS, (8, length), generator=generator) for _ in range(2))
    counts = torch.randint(1, length, (8, 1), generator=generator)
    counts[:4] //= 8
    return words, labels.where(torch.arange(length) <= counts, -100)


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"Words": Words, "Mixing": Mixing, "Asking": Asking, "Casting": Casting, "experts": experts}[kind]()


def _cast(kind: str) -> contextlib.AbstractContextManager[Any]:
    wanted = kind in ("Asking", "Casting", "experts")
    return torch.autocast("cpu", dtype=torch.bfloat16) if wanted else contextlib.nullcontext()


def plainly(kind: str) -> list[float]:
    """Return the losses of a plain loop."""
    return _plain_losses(kind, [batch_of(kind, step) for step in range(STEPS)], LR)


def _plain_losses(kind: str, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> list[float]:
    model = _build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = list[float]()
    for batch in batches:
        with _cast(kind):
            loss = _loss_of(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(kind: str, line: str) -> tuple[list[float], Sequence[str]]:
    """Return the losses under a plan, and its reasons."""
    build, optimizer = functools.partial(_build, kind), functools.partial(torch.optim.SGD, lr=LR)
    with mw.apply_plan(build, line, loss_fn=_loss_of, optimizer=optimizer) as model:
        losses = list[float]()
        for step in range(STEPS):
            with _cast(kind):
                losses.append(model.step(mw.split_batch(batch_of(kind, step), model)).loss)
        return losses, model.plan.reasons


def around_a_loop(line: str) -> list[float]:
    """Return losses of one batch, of steps inside of one autocast around their loop."""
    kind, optimizer = "experts", functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(functools.partial(_build, kind), line, loss_fn=_loss_of, optimizer=optimizer) as model:
        share = mw.split_batch(batch_of(kind, 0), model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [model.step(share).loss for _ in range(4)]


def around_each_step() -> list[float]:
    """Return the same of a plain loop, with autocast around each forward."""
    return _plain_losses("experts", [batch_of("experts", 0)] * 4, 0.1)
