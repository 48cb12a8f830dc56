"""Executor: one rank's actions of a pipeline schedule, run in their order. It knows no schedule by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic

import torch

from meshwright.apply.modules.copies import own_copy
from meshwright.apply.passes import StepWork, TermT
from meshwright.apply.pipeline.stage import Stage
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.schedule import ActionKind, PipelineSchedule
from meshwright.spec import Plan

__all__: list[str] = []


_KINDS: Final = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input_grad",
    ActionKind.WEIGHT_GRAD: "weight_grad",
}
"""Kinds of their spans."""


def make_schedule(plan: Plan, num_micro_batches: int) -> PipelineSchedule:
    """Return the order of work of a plan's stages for so many micro-batches."""
    return PipelineSchedule.build(
        plan.schedule, num_ranks=plan.pp, num_micro_batches=num_micro_batches, virtual=plan.virtual
    )


class ScheduleExecutor(Generic[TermT]):
    """Runs the micro-batches of one step through the stages of this rank.

    Args:
        stages: The stages of this rank, by number.
        schedule: The order of work of all ranks.
        rank: This rank's place on the pipe.
        work: What the step has it run; every rank of the pipeline has as many micro-batches.
        arm: Called before the last backward, where gradients may leave while it runs.
        tensor: The engine that cuts the layers inside of the stages, or None.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: PipelineSchedule,
        rank: int,
        work: StepWork[TermT],
        *,
        arm: Callable[[], None],
        tensor: TensorEngine | None,
    ) -> None:
        self._stages = stages
        self._work = work
        self._arm = arm
        self._tensor = tensor
        self._has_backward = torch.is_grad_enabled()
        actions = schedule.actions[rank]
        if not self._has_backward:
            actions = tuple(action for action in actions if action.kind is ActionKind.FORWARD)
        self._actions = actions
        self._arms_last = schedule.virtual == 1
        self._in_halves = {(stage, index) for stage, kind, index in actions if kind is ActionKind.INPUT_GRAD}
        self._terms: dict[int, TermT] = {}
        self._streams: dict[tuple[int, int], Any] = {}

    def run(self) -> list[TermT]:
        """Do everything, backward too where gradients are on, and return the losses that stages of this rank compute."""
        last = len(self._actions) - 1
        for place, action in enumerate(self._actions):
            recorder = self._stages[action.stage].ledger.recorder
            begin = 0 if recorder is None else recorder.now()
            if action.kind is ActionKind.FORWARD:
                self._forward(action.stage, action.micro_batch)
            else:
                if place == last and self._arms_last:
                    self._arm()
                self._backward(action.stage, action.micro_batch, action.kind)
            if recorder is not None:
                details = {"stage": action.stage, "micro_batch": action.micro_batch}
                recorder.add(_KINDS[action.kind], action, begin, details)
        return [self._terms[index] for index in sorted(self._terms)]

    def _forward(self, stage: int, index: int) -> None:
        micro_batch = self._work.micro_batches[index]
        if len(self._stages) > 1:  # each of them runs the model's own code, which may write into the batch
            micro_batch = dataclasses.replace(micro_batch, batch=own_copy(micro_batch.batch))
        # Tensors that other stages compute are fake in what is returned; None where the loss reads numbers that they have.
        term = self._stages[stage].forward(
            index,
            lambda module: self._work.loss_of(module, micro_batch),
            in_halves=(stage, index) in self._in_halves,
        )
        if self._tensor is not None and self._has_backward:
            self._streams[stage, index] = self._tensor.streams()
        if term is not None and self._computes(stage, term):
            self._terms[index] = term

    def _computes(self, stage: int, term: TermT) -> bool:
        return self._stages[stage].home_of(term.value) == stage

    def _backward(self, stage: int, index: int, kind: ActionKind) -> None:
        """Run a stage's part of a backward, or a half of it, from the loss where this stage computes it."""
        if kind is ActionKind.WEIGHT_GRAD:
            self._stages[stage].run_rest(index)
            return
        term = self._terms.get(index)
        root = self._work.root_of(term) if term is not None and self._computes(stage, term) else None
        if self._tensor is not None:
            self._tensor.set_streams(self._streams.pop((stage, index)))
        self._stages[stage].backward(index, root)
