"""Models whose samples see one another, and what a first look may not show: buffers that count, a Loss, a batch that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

NUM_SAMPLES, WIDTH, NUM_WORDS, STEPS = 12, 8, 10, 3


class Net(nn.Module):
    """Features of words.

    Args:
        writes: What a forward writes into a buffer, in eval mode too: "count", "average", or nothing; "centres" in eval mode
            alone, instead, so that samples see one another there.
    """

    level: Tensor

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.writes = writes
        self.register_buffer("level", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).mean(1)
        if self.writes == "count":
            self.level += 1
        if self.writes == "average":
            self.level.mul_(0.9).add_(0.1 * x.detach().mean())
        if self.writes == "centres" and not self.training:
            x = x - x.mean(0)
        return self.down(torch.tanh(self.up(x)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(NUM_WORDS, (NUM_SAMPLES, 5), generator=draw), torch.arange(NUM_SAMPLES) % 2


def _pairs(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss of each sample that compares it with the others of its class, and which samples have one."""
    own = torch.eye(len(labels), dtype=torch.bool)
    scores = (outputs @ outputs.T).masked_fill(own, -1e9).log_softmax(1)
    alike = (labels[:, None] == labels[None]) & ~own
    return -(scores * alike).sum(1) / alike.sum(1).clamp(min=1), alike.any(1)


def mean_loss(outputs: Tensor, given: Any) -> Tensor:
    losses, has_pair = _pairs(outputs, given[1])
    return losses[has_pair].mean()


def summed_loss(outputs: Tensor, given: Any) -> mw.Loss:
    losses, has_pair = _pairs(outputs, given[1])
    return mw.Loss(losses[has_pair].sum(), has_pair.sum())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {"mean": mean_loss, "sum": summed_loss}


def build(writes: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(writes).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plainly() -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and parameters of a plain loop."""
    module = build("")
    optimizer, losses = sgd(module.parameters()), list[float]()
    for step in range(STEPS):
        given = batch(step)
        loss = mean_loss(module(given[0]), given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.named_parameters())


def train(line: str, writes: str = "", loss: str = "mean", first: str = "") -> dict[str, Any]:
    """Train, perhaps after a first batch that no step can take; rank 0's warnings are kept.

    Args:
        line: The plan.
        writes: As for `Net`.
        loss: Its name.
        first: The batch before: "none", "word" that no table has, "key", "evaluated" none, or no such batch.
    """
    warnings, log = _Kept(), logging.getLogger("meshwright")
    log.addHandler(warnings)
    model = mw.apply_plan(lambda: build(writes), line, loss_fn=LOSSES[loss], optimizer=sgd)
    raised = ""
    try:
        if first == "evaluated":
            model.evaluate(None)
        elif first:
            model.step(_failing(first, model))
    except Exception as error:
        raised = type(error).__name__
    losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(STEPS)]
    log.removeHandler(warnings)
    state = {name: value for name, value in model.full_state_dict().items() if name != "level"}
    return {"losses": losses, "state": state, "reasons": model.plan.reasons, "raised": raised, "told": warnings.texts}


def evaluate_first(line: str, writes: str) -> float:
    """Evaluate before any step, by a loss of each sample."""
    model = mw.apply_plan(lambda: build(writes), line, loss_fn=lambda out, given: out.square().mean(), optimizer=sgd)
    return model.evaluate(mw.split_batch(batch(0), model))["loss"]


def fails_late(line: str) -> dict[str, Any]:
    """Train, with a batch that raises on every rank between the steps."""
    model = mw.apply_plan(lambda: build(""), line, loss_fn=mean_loss, optimizer=sgd)
    losses: list[float] = []
    for step in range(STEPS):
        try:
            model.step(_failing("word", model))
        except Exception:  # a rank that raises, and one that hears of it
            losses.append(model.step(mw.split_batch(batch(step), model)).loss)
    return {"losses": losses, "state": {k: v for k, v in model.full_state_dict().items() if k != "level"}}


def _failing(kind: str, model: Any) -> Any:
    if kind == "none":
        return None
    tokens, labels = batch(0)
    if kind == "word":
        return mw.split_batch((tokens + NUM_WORDS, labels), model)
    return mw.split_batch({"tokens": tokens, "unknown": labels}, model)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
