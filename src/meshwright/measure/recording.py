"""Recording of steps under a plan, with the gradients that the optimizer saw, for comparison with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.describe.batches import split_batch
from meshwright.errors import StoppedOnRequest
from meshwright.measure.oracle import ModuleOutputs, StepRecord, record_outputs, to_dtype
from meshwright.run.applying import apply_plan
from meshwright.run.parallel_model import ParallelModel
from meshwright.run.sentinels.settings import DEFAULT_EVERY
from meshwright.spec import Plan

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What both sides of a comparison share.

    Args:
        num_steps: Optimizer steps; None: one per batch [count].
        optimizer: Factory from parameters to an optimizer; None: SGD with a learning rate of 0.1.
        seed: Seed of the model's initialisation.
        max_grad_norm: Clip the gradients to this global 2-norm; None: do not clip.
        dtype: Convert floating-point parameters, buffers and batches to this; None: leave them.
        before_step: Called with the step's index and the model before every step, for example to freeze a part.
    """

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
    draw_reasons: list[str] | None = None,
    sentinel_every: int = DEFAULT_EVERY,
    rng: Literal["torch", "global"] = "torch",
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
        draw_reasons: The list for the plan's reasons about random numbers.
        sentinel_every: As for `apply_plan`.
        rng: As for `apply_plan`; by default as `oracle_steps` draws.

    Returns:
        One record for each step, with this rank's view of gradients and parameters.

    Raises:
        StoppedOnRequest: A signal asked the ranks to stop.
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
        rng=rng,
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
            is_recorded = with_outputs and step == 0 and model.engine.num_replicas == 1
            if is_recorded:
                with model.engine.switch.plain():  # as in a step: the library's own code reads parts of parameters
                    model.stepper.prepare(share)  # a strategy's own look at the model is not the step's forward
            with (
                record_outputs(model.module, model.engine.own_value)
                if is_recorded
                else contextlib.nullcontext({}) as outputs
            ):
                result = model.step(share)
            if model.stop_requested:
                raise StoppedOnRequest(f"stopped on request in step {step} of the plan '{plan}': nothing is compared")
            outputs = _of_this_rank(model.engine, outputs)
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
            loss_reasons += [*model.engine.joined_reasons, *model.stepper.rule.reasons]
        if draw_reasons is not None and model.stepper.draws is not None:
            draw_reasons += model.stepper.draws.reasons
        if model.world.stop_requested():  # since the last step began, which is when the ranks agree on it
            raise StoppedOnRequest(f"stopped on request after the last step of the plan '{plan}': nothing is compared")
        return records
    finally:
        model.close()


def _of_this_rank(engine: Engine, outputs: dict[str, ModuleOutputs]) -> dict[str, ModuleOutputs]:
    """Return what modules gave without what stands for others: layers of other stages, terms of sums over shards."""
    return {
        name: dataclasses.replace(numbers, num_forwards=numbers.num_forwards // engine.num_walks)
        for name, numbers in outputs.items()
        if engine.gives_own(name)
    }


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
