"""Draws by place for one plain process, beside which a plan with `rng="global"` is compared."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.describe.batches import BatchSplitter
from meshwright.run.global_draws import GlobalDraws
from meshwright.run.losses.enough import enough_samples
from meshwright.run.losses.loss import LossTerm

__all__: list[str] = []


class _Alone:
    """What `GlobalDraws` asks of an engine, for a process without ranks."""

    num_replicas = num_shares = copies = size = 1
    group_rank = share = 0
    is_prepared = needs_lockstep = False
    device = torch.device("cpu")
    ledger = types.SimpleNamespace(of_checks=contextlib.nullcontext)

    @property
    def group(self) -> _Alone:
        return self

    everyone = group

    def all_gather_json(self, value: Any, **_: Any) -> list[Any]:
        return [value]


class PlainDraws:
    """The context of each step of a plain loop, in which it draws what every plan draws.

    Args:
        seed: Of the run.
        loss_fn: The loss, which may draw, too; None: the model's own.
    """

    def __init__(self, seed: int, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        self._seed = seed
        self._loss_fn = loss_fn
        self._of: tuple[nn.Module, GlobalDraws] | None = None

    @contextlib.contextmanager
    def __call__(self, step: int, model: nn.Module, batch: Any, first: int = 0) -> Iterator[None]:
        """Run forward and backward of a step inside the context: on a global batch, or the part of it from a sample on."""
        splitter = BatchSplitter()
        if self._of is None or self._of[0] is not model:
            alone: Any = _Alone()
            self._of = model, GlobalDraws(alone, model, self._seed)
            self._of[1].learn(enough_samples([batch], splitter), splitter, self._term)
        draws = self._of[1]
        draws.step = step
        with draws.running("step"), draws.forward("step", first, splitter.count(batch), batch=batch):
            yield

    def _term(self, outputs: Any, batch: Any) -> LossTerm:
        if self._loss_fn is not None:
            self._loss_fn(outputs, batch)
        return LossTerm(torch.zeros(()), 1.0, is_mean=True)
