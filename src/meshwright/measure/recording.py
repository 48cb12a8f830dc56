"""Recording of steps under a plan, with the gradients that the optimizer saw, for comparison with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import FakeTensor, current_function_mode, without_function_modes
from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.apply.pipeline.walking.stage_forward import StageForward
from meshwright.apply.pipeline.walking.stand_ins import value_of
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.tensor_layout import is_inside
from meshwright.describe.batches import split_batch
from meshwright.measure.oracle import ModuleOutputs, StepRecord, record_outputs, to_dtype
from meshwright.measure.outputs import is_readable
from meshwright.run.parallel_model import ParallelModel, apply_plan
from meshwright.run.sentinels.sentinels import DEFAULT_EVERY
from meshwright.spec import Plan

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options that both sides of a comparison share."""

    num_steps: int | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    seed: int = 0
    max_grad_norm: float | None = None
    dtype: torch.dtype | None = None
    before_step: Callable[[int, nn.Module], None] | None = None


def plan_steps(
    build_model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    options: StepOptions | None = None,
    shares: Sequence[Any] | None = None,
    devices: Sequence[Any] | None = None,
    split: Callable[[Any, int], list[Any]] | None = None,
    with_outputs: bool = False,
    loss_reasons: list[str] | None = None,
    sentinel_every: int = DEFAULT_EVERY,
) -> list[StepRecord]:
    """Train under a plan and record every step; call it on every rank.

    Args:
        build_model: As for `apply_plan`.
        plan: The plan.
        batches: Global batches; step i uses batch i, starting over at the end.
        loss_fn: As for `apply_plan`.
        options: Steps, optimizer, seed, clipping, dtype of the batches.
        shares: This rank's own share of each batch instead of `split_batch`'s; None stands for an empty one.
        devices: For the plans of one process.
        split: As for `apply_plan`.
        with_outputs: Whether to record this rank's share of the modules' outputs in the first step. Replicas of one process run
            copies of the modules, and record nothing.
        loss_reasons: The list for the plan's reasons about the loss. With it, a loss that parts of a batch do not give is not
            refused, and its results are compared.
        sentinel_every: As for `apply_plan`.

    Returns:
        One record for each step, with this rank's view of gradients and parameters.
    """
    options = options or StepOptions()
    make = options.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    if options.dtype is not None:
        batches = [to_dtype(batch, options.dtype) for batch in batches]
    model = apply_plan(
        build_model,
        plan,
        loss_fn=loss_fn,
        optimizer=make,
        seed=options.seed,
        max_grad_norm=options.max_grad_norm,
        devices=devices,
        split=split,
        sentinel_every=sentinel_every,
    )
    try:
        seen = GradientRecorder(model)
        model.stepper.rule.refuses = loss_reasons is None
        records = []
        for step in range(len(batches) if options.num_steps is None else options.num_steps):
            if options.before_step is not None:
                options.before_step(step, model.module)
            share = split_batch(batches[step % len(batches)], model) if shares is None else shares[step % len(shares)]
            seen.gradients = {}
            is_recorded = with_outputs and step == 0 and plan.mode != "data_parallel"
            if is_recorded:
                with model.engine.switch.plain():  # as in a step: the library's own code reads parts of parameters
                    model.stepper.prepare(share)  # a strategy's own look at the model is not the step's forward
            with record_outputs(model.module, _local) if is_recorded else contextlib.nullcontext({}) as outputs:
                result = model.step(share)
            outputs = _of_this_rank(model, outputs)
            with model.whole_parameters():
                parameters = {name: p.detach().clone().cpu() for name, p in model.module.named_parameters()}
                buffers = {name: b.detach().clone().cpu() for name, b in model.module.named_buffers()}
            records.append(
                StepRecord(
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    gradients=seen.gradients,
                    parameters=parameters,
                    buffers=buffers,
                    skipped=result.skipped,
                    outputs=outputs,
                )
            )
        if loss_reasons is not None:
            loss_reasons += model.stepper.rule.reasons
        return records
    finally:
        model.close()


def _local(tensor: Tensor) -> Tensor | None:
    """Return this rank's part of a tensor, plain; None where another pipeline stage computes it."""
    walk = current_function_mode()
    if isinstance(walk, StageForward):
        value = value_of(tensor)
        # Every stage computes tensors that depend on the inputs alone: they count on the first.
        home = 0 if value is None or value.owner is not walk or value.home is None else value.home
        if home != walk.stage:
            return None
    elif isinstance(tensor, FakeTensor):  # inside a layer of another stage, run for its output shapes only
        return None
    with without_function_modes():
        return tensor.local if isinstance(tensor, Slices) else tensor.detach()


def _of_this_rank(model: ParallelModel, outputs: dict[str, ModuleOutputs]) -> dict[str, ModuleOutputs]:
    """Return module outputs without placeholders: layers of other stages, terms of sums over shards."""
    engine = model.engine
    if isinstance(engine, PipelineEngine):
        calls, rank_of = engine.stage_map.calls, engine.schedule(1).rank_of_stage
        elsewhere = [
            unit
            for unit, stages in calls.items()
            if engine.pp_group.group_rank not in {rank_of(stage) for stage in stages}
        ]
        outputs = {
            name: dataclasses.replace(numbers, num_forwards=numbers.num_forwards // model.plan.virtual)
            for name, numbers in outputs.items()
            if not any(is_inside(name, unit) for unit in elsewhere)
        }
        engine = engine.inner
    if isinstance(engine, TensorEngine) and engine.cutting is not None:
        layout = engine.cutting.layout
        outputs = {name: numbers for name, numbers in outputs.items() if is_readable(name, layout)}
    return outputs


class GradientRecorder:
    """Records what the optimizer sees: clones of the gradients at the begin of its step."""

    def __init__(self, model: ParallelModel) -> None:
        self.gradients: dict[str, Tensor | None] = {}
        self._model = model
        if model.optimizer is not None:
            model.optimizer.register_step_pre_hook(self._record)

    def _record(self, *_: Any) -> None:
        full = self._model.full_gradients()
        self.gradients = {name: None if g is None else g.detach().clone().cpu() for name, g in full.items()}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give tensors that the model creates itself this dtype too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
