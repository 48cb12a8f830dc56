"""What ranks run for `run.py`: a small model trained with one mutation, and `verify` on it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

VOCABULARY, WIDTH, LENGTH = 12, 8, 5
NUM_STEPS, EVERY = 6, 2
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.norm(x))))))


class Net(nn.Module):
    """A language model without attention: whatever is wrong with an exchange shows in it as well."""

    def __init__(
        self, *, dropout: float = 0.0, is_tied: bool = False, statistics: bool = False, between: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)
        self.statistics, self.between = statistics, nn.Dropout(between)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.between(block(x))
        x = self.norm(x.flatten(0, 1)).view_as(x) if self.statistics else self.norm(x)
        return self.head(x)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {},
    "dropout": {"dropout": 0.3},
    "dropout_between": {"dropout": 0.3, "between": 0.3},
    "single": {},
    "tied": {"is_tied": True},
    "batch_norm": {"statistics": True},
}


def build(model: str) -> nn.Module:
    return Net(**MODELS[model]).to(torch.float32 if model == "single" else torch.float64)


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def smoothed_loss(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), label_smoothing=0.2)


def global_batch(step: int, samples: int) -> Any:
    ids = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mutations() -> list[Any]:
    """Return the catalogue; imported here, since what it patches is imported with it."""
    from catalogue import CATALOGUE

    return CATALOGUE


def train(index: int, every: int, is_mutated: bool) -> dict[str, Any]:
    """Train with or without a mutation; return values and losses, or what stopped it."""
    mutation = mutations()[index]
    told: dict[str, Any] = {"losses": [], "norms": [], "error": "", "text": "", "layouts": {}, "reasons": []}
    loss = smoothed_loss if mutation.model == "smoothed" else loss_fn
    with contextlib.ExitStack() as stack:
        if is_mutated:
            mutation.install(stack)
        try:
            model = mw.apply_plan(
                functools.partial(build, mutation.model),
                mutation.plan,
                loss_fn=loss,
                optimizer=SGD,
                sentinel_every=every,
                **mutation.options,
            )
            stack.enter_context(contextlib.closing(model))
            for step in range(NUM_STEPS):
                result = model.step(mw.split_batch(global_batch(step, mutation.samples), model))
                told["losses"].append(result.loss)
                told["norms"].append(result.grad_norm)
            told["layouts"] = dict(model.plan.layouts)
            told["reasons"] = list(model.plan.reasons)
            told["values"] = {name: value.double() for name, value in model.full_state_dict().items()}
        except (mw.MeshwrightError, RuntimeError, ValueError) as error:
            told |= {"error": type(error).__name__, "text": str(error).splitlines()[0]}
    return told


def verify(index: int) -> dict[str, Any]:
    """Return what `verify` says of a mutated plan."""
    mutation = mutations()[index]
    loss = smoothed_loss if mutation.model == "smoothed" else loss_fn
    batches = [global_batch(step, mutation.samples) for step in range(3)]
    with contextlib.ExitStack() as stack:
        mutation.install(stack)
        try:
            report = mw.verify_plan(
                functools.partial(build, mutation.model),
                mw.Plan.parse(mutation.plan),
                batches,
                loss,
                **mutation.options,
            )
        except (mw.MeshwrightError, RuntimeError, ValueError) as error:
            return {"equal": False, "text": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    first = report.first_difference
    return {"equal": report.equal, "text": "" if first is None else str(first.name)}
