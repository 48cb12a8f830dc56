"""Programs whose code raises on one rank alone, for ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import exit_code_of
from meshwright.ranks.join import join_world

VOCABULARY, WIDTH = 32, 16


class UnfitError(RuntimeError):
    """What the user's code raises."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.fails: Callable[[], bool] = lambda: False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails():
            raise UnfitError("this layer is no good")
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (8, 5), generator=generator)
    return tokens, torch.randint(0, 4, (8,), generator=generator)


class Failure:
    """Raises on one rank from one step on, where it is asked to."""

    def __init__(self, rank: int, step: int) -> None:
        self.is_here = join_world().rank == rank
        self.first, self.step = step, 0

    def is_due(self) -> bool:
        return self.is_here and self.step >= self.first

    def raise_(self, *_: Any) -> None:
        if self.is_due():
            raise UnfitError("this hook is no good")

    def interrupt(self) -> bool:
        if self.is_due():
            raise KeyboardInterrupt
        return False

    def put(self, model: Model, where: str) -> Callable[[Any, Any], Tensor]:
        """Put it into a model, or the loss that is returned."""

        def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
            if where == "loss" and self.is_due():
                raise UnfitError("this loss is no good")
            if where == "gradient":
                outputs.register_hook(self.raise_)
            return F.cross_entropy(outputs, batch[1])

        if where == "layer":
            model.blocks[2].fails = self.is_due  # pyright: ignore[reportArgumentType]
        elif where == "interrupt":
            model.blocks[2].fails = self.interrupt  # pyright: ignore[reportArgumentType]
        elif where == "hook":
            model.blocks[2].register_full_backward_hook(lambda *_: self.raise_())
        elif where == "post-accumulate":
            model.head.weight.register_post_accumulate_grad_hook(self.raise_)
        return loss_fn


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended on a rank: with which exception, and when, by the clock of this host [s]."""

    kind: str
    text: str
    ended_at: float
    exit_code: int = 0


def _ended(error: BaseException) -> Ended:
    return Ended(type(error).__name__, str(error), time.monotonic(), exit_code_of(error))


def raised(line: str, where: str, step: int, *, rank: int = 1, calls: str = "step") -> Ended:
    """Train until a rank raises; `calls` is what is called with each batch."""
    torch.manual_seed(0)
    failure, model = Failure(rank, step), Model().double()
    loss_fn = failure.put(model, where)
    try:
        with mw.apply_plan(
            lambda: model, line, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
        ) as planned:
            for number in range(step + 1):
                failure.step = number
                tokens, labels = mw.split_batch(batch_of(number), planned)
                if where == "index" and failure.is_due():
                    tokens[0, 0] = VOCABULARY
                getattr(planned, calls)((tokens, labels))
    except BaseException as error:
        return _ended(error)
    return Ended("", "", time.monotonic())


def unfit_batch(line: str) -> Ended:
    """Take a step, and one whose batch one rank gives as a mapping that the model does not take."""
    torch.manual_seed(0)
    with mw.apply_plan(Model, line, loss_fn=_cross_entropy) as planned:
        planned.step(mw.split_batch(batch_of(0), planned))
        tokens, labels = mw.split_batch(batch_of(1), planned)
        try:
            planned.step({"tokens": tokens, "labels": labels} if join_world().rank == 1 else (tokens, labels))
        except mw.ApplyError as error:
            return _ended(error)
    return Ended("", "", time.monotonic())


def _cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def refused_and_trained(line: str) -> list[float]:
    """Take a step that all ranks refuse, then others; return their losses."""
    torch.manual_seed(0)
    model = Model().double()
    with mw.apply_plan(
        lambda: model,
        line,
        loss_fn=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ) as planned:
        batches = [mw.split_batch(batch_of(number), planned) for number in range(3)]
        planned.step(batches[0])
        head = model.head
        if join_world().rank == 1:
            model.head = nn.Linear(WIDTH, 4).double()
        for _ in range(2):
            with contextlib.suppress(mw.ApplyError):
                planned.step(batches[1])
                raise AssertionError("a step was taken with a module that was put in place of another on one rank")
        model.head = head
        return [planned.step(batch).loss for batch in batches[1:]]


class Graph(nn.Module):
    """A layer over one graph, whose adjacency matrix is not cut by nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.layer(nodes)


def notes_of_a_graph_in_parts(line: str) -> str:
    """Return what is said beside the error of a model that takes no part of its batch."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(Graph(), line, loss_fn=lambda outputs, _: outputs.square().mean(), optimizer=sgd, seed=0)
    graph = ((torch.ones(6, 4), torch.eye(6)), torch.ones(6))
    try:
        model.step(mw.split_batch(graph, model))
    except RuntimeError as error:
        return " ".join(map(str, getattr(error, "__notes__", ())))
    finally:
        model.close()
    return ""
