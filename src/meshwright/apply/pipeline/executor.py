"""Executor: one rank's actions of a pipeline schedule, run in their order. It knows no schedule by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.schedule import ActionKind

__all__: list[str] = []


class HasValue(Protocol):
    """The loss of a micro-batch, as far as the executor reads it."""

    @property
    def value(self) -> Tensor:
        """The computed loss, on the stage that computes it."""
        ...


_Term = TypeVar("_Term", bound=HasValue)


class ScheduleExecutor(Generic[_Term]):
    """Runs the micro-batches of one step through the stages of this rank.

    Args:
        engine: The pipeline.
        num_micro_batches: Micro-batches, which every rank of the pipeline has [count].
        term_of: (module, which micro-batch) -> its loss.
        root_of: Loss -> what backward is run from and the gradient there; None where nothing is to be trained.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        num_micro_batches: int,
        term_of: Callable[[nn.Module, int], _Term | None],
        root_of: Callable[[_Term], tuple[Tensor, Tensor | None] | None],
    ) -> None:
        self._engine = engine
        self._num_micro_batches = num_micro_batches
        self._term_of = term_of
        self._root_of = root_of
        self._terms: dict[int, _Term] = {}
        self._in_halves: set[tuple[int, int]] = set()

    def run(self) -> list[_Term]:
        """Run all actions, backward too where gradients are enabled, and return the losses that this rank's stages compute."""
        self._engine.begin_schedule(self._num_micro_batches)
        if not self._num_micro_batches:
            return []
        schedule = self._engine.schedule(self._num_micro_batches)
        actions = schedule.actions[self._engine.pp_group.group_rank]
        if not torch.is_grad_enabled():
            actions = tuple(action for action in actions if action.kind is ActionKind.FORWARD)
        self._in_halves = {(stage, index) for stage, kind, index in actions if kind is ActionKind.INPUT_GRAD}
        last = len(actions) - 1
        for place, action in enumerate(actions):
            if action.kind is ActionKind.FORWARD:
                self._forward(action.stage, action.micro_batch)
                continue
            if place == last and schedule.virtual == 1:
                self._engine.arm()
            self._backward(action.stage, action.micro_batch, action.kind)
        return [self._terms[index] for index in sorted(self._terms)]

    def _forward(self, stage: int, micro_batch: int) -> None:
        term = self._engine.run_forward(
            stage,
            micro_batch,
            lambda module: self._term_of(module, micro_batch),
            in_halves=(stage, micro_batch) in self._in_halves,
        )
        if term is not None and self._engine.computes(stage, term.value):
            self._terms[micro_batch] = term

    def _backward(self, stage: int, micro_batch: int, kind: ActionKind) -> None:
        term = self._terms.get(micro_batch)
        is_home = term is not None and self._engine.computes(stage, term.value)
        root = self._root_of(term) if is_home and term is not None else None
        self._engine.run_backward(stage, micro_batch, root, kind)
