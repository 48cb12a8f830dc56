"""apply_plan, and the model that it returns."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from meshwright._torch_texts import says_written_into_expanded
from meshwright.apply.data.flat_unit import WRITE_WHOLE
from meshwright.apply.data.optimizer import refuse_coupled
from meshwright.apply.engine import Engine
from meshwright.apply.recompute.checkpointing import Recompute
from meshwright.apply.shards.optimizer_state import OptimizerState
from meshwright.apply.shards.state_dicts import StateGuard
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.apply.state.class_identity import refuse_class_identity
from meshwright.apply.state.iterators import refuse_iterators
from meshwright.comm.ledger import Ledger
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.mesh import MeshSpec
from meshwright.ranks.join import join_world, told_to_peers
from meshwright.ranks.world import World
from meshwright.run.assembly import (
    NamedOptimizerFactory,
    OptimizerFactory,
    build_engine,
    build_module,
    build_optimizer,
    check_options,
    choose_devices,
    require_world,
)
from meshwright.run.checkpoints.background import BackgroundSave, raise_error, wait_for
from meshwright.run.gate import OptimizerGate, without_backward
from meshwright.run.losses.loss import LossRule
from meshwright.run.result import StepResult
from meshwright.run.sentinels.sentinels import DEFAULT_EVERY, check_sentinels, make_sentinels
from meshwright.run.step import Stepper
from meshwright.spec import Plan
from meshwright.spec.supported import refuse_unbuilt

__all__: list[str] = []

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}


@told_to_peers
def apply_plan(
    build_model: nn.Module | Callable[[], nn.Module],
    plan: Plan | str,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | NamedOptimizerFactory | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    non_finite: Literal["stop", "skip"] = "stop",
    devices: Sequence[torch.device | str] | None = None,
    split: Callable[[Any, int], list[Any]] | None = None,
    example_batch: Any = None,
    sentinel_every: int = DEFAULT_EVERY,
    on_finding: Literal["stop", "warn"] = "stop",
) -> ParallelModel:
    """Lay a plain model over devices as the plan says, without changing what it computes.

    Every rank of the plan calls this with the same arguments (`meshwright.launch`, torchrun and srun start ranks); the
    one-process plans ("single", "data_parallel", "model_parallel") are called once.

    Args:
        build_model: The model, or a function that builds it; it is called under `seed`, the same on every rank. The module
            itself is used, not a copy, and its parameters keep their names and identity.
        plan: The plan, or its one-line form.
        loss_fn: ``(outputs, batch)`` -> a scalar mean over this batch's samples, or its labels that are not ignored; or
            ``meshwright.Loss(sum, weight)``. None takes the model's own ``.loss``. What a mean counts is tried out on the first
            batch; a loss that parts of the batch do not give is refused where the plan cuts the batch.
        optimizer: A factory such as ``functools.partial(torch.optim.AdamW, lr=3e-4)``, or an optimizer over this model's
            parameters, or None to leave the parameters alone and only compute gradients.
        seed: Seeds the building of the model and, apart for each rank, what it draws afterwards.
        max_grad_norm: Clip to this global 2-norm, by torch.nn.utils.clip_grad_norm_'s rule; None does not clip.
        non_finite: What a NaN or Inf does, before the optimizer: "stop" raises NonFiniteError on every rank, "skip" leaves
            the step out.
        devices: Devices of this process; default: the visible GPUs, else CPU.
        split: ``(batch, num_parts) -> list of batches`` for batches that cannot be cut along dim 0. Samples are counted by the
            batch's ``num_samples``, by ``split.count(batch)``, or by dim 0 of the targets.
        example_batch: A batch by which tensor parallelism finds out how the model can be cut; None waits for the first one.
        sentinel_every: Steps between two sentinels, which compare what several ranks hold, and a part of the strategy with one
            device; batches, learning rates and losses are compared in every step. 0 compares nothing [count].
        on_finding: What a difference does, before the optimizer: "stop" raises CorruptionError on every rank, "warn" logs it
            and adds it to the step's result.

    Returns:
        The model, ready for `step`.

    Raises:
        ApplyError: The plan does not fit the model, the devices or the ranks; ranks hold different models or plans.
        ConfigError: The plan's line cannot be read.
    """
    world = join_world()
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    check_options(max_grad_norm, non_finite)
    check_sentinels(sentinel_every, on_finding)
    refuse_unbuilt(plan)
    require_world(plan, world)
    chosen = choose_devices(plan, devices, world)
    module = build_module(build_model, seed, plan, world)
    splitter = BatchSplitter(split)
    if plan.num_devices > 1 or plan.micro_batches > 1 or plan.micro_batch_size or plan.recompute != "none":
        refuse_iterators(module, [] if loss_fn is None else [loss_fn], str(plan))
        refuse_class_identity(module, [] if loss_fn is None else [loss_fn], plan)
    recompute = None if plan.recompute == "none" else Recompute(module, plan.recompute)
    engine = build_engine(module, plan, world, chosen, splitter)
    built = build_optimizer(optimizer, module, may_fuse=plan.dp > 1 or plan.tp > 1 or plan.pp > 1)
    options = {
        "seed": seed,
        "max_grad_norm": max_grad_norm,
        "non_finite": non_finite,
        "sentinel_every": sentinel_every,
        "on_finding": on_finding,
    }
    place = (plan.mesh if plan.mode == "ranks" else MeshSpec(), world.rank)
    engine.use_switch(ShardSwitch(str(plan)))
    sentinels = make_sentinels(engine, place, built, loss_fn, options)
    if built is not None and engine.deals_parameters_out:
        refuse_coupled(built, str(plan))
    gate = OptimizerGate(built)
    engine.adopt_optimizer(built)
    stepper = Stepper(
        engine,
        LossRule(loss_fn, module, splitter),
        splitter,
        optimizer=built,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        autocast=_AUTOCAST[plan.precision],
        max_grad_norm=max_grad_norm,
        non_finite=non_finite,
        sentinels=sentinels,
        gate=gate,
    )
    if recompute is not None:
        recompute.before = engine.before_layer
        sentinels.recompute = recompute
    if example_batch is not None:
        stepper.prepare(example_batch)
    if engine.everyone.size > 1 or engine.num_replicas > 1:
        gate.shut(module, str(plan))
    axes = {name: getattr(plan, name) for name in ("tp", "pp") if getattr(plan, name) > 1}
    axes |= {"zero": plan.zero} if plan.zero and plan.dp > 1 else {}
    if axes and plan.mode == "ranks" and isinstance(built, torch.optim.Optimizer):
        engine.switch.optimizer = OptimizerState(built, module, engine.switch.moment, axes, world.rank)
    guard = StateGuard(engine, str(plan)) if plan.num_ranks > 1 else None
    return ParallelModel(plan, world, engine, stepper, recompute, state_guard=guard, seed=seed)


def _memory_bytes(tensors: Iterable[torch.Tensor]) -> int:
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}.values())


class ParallelModel:
    """A model under a plan: it steps, evaluates and gives its state back as if it were on one device.

    Made by `apply_plan`. Everything here is called on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        engine: Engine,
        stepper: Stepper,
        recompute: Recompute | None = None,
        *,
        state_guard: StateGuard | None = None,
        seed: int = 0,
    ) -> None:
        self._plan = plan
        self.seed = seed
        """Seed of the parameters and the first random numbers."""
        self.world = world
        """This process's place among the ranks."""
        self.engine = engine
        self.stepper = stepper
        self._recompute = recompute
        self._state_guard = state_guard
        self._number = world.calls.num_models
        engine.switch.begin()
        self.saving: BackgroundSave | None = None
        """A save under way beside training."""
        self.num_steps = 0
        """Calls of `step` so far [count]."""

    @property
    def plan(self) -> Plan:
        """The plan that was applied; under tensor parallelism with what is cut, and why the rest is not, once that is known."""
        plan = self.engine.detail(self._plan)
        told = self.stepper.rule.reasons
        return plan.replace(reasons=(*plan.reasons, *told)) if told else plan

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.engine.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer over the module's parameters."""
        return self.stepper.optimizer

    @property
    def splitter(self) -> BatchSplitter:
        """How batches are counted and cut."""
        return self.stepper.splitter

    @property
    def ledger(self) -> Ledger:
        """What this rank has exchanged."""
        return self.engine.group.ledger

    @property
    def dp_rank(self) -> int:
        """This rank's number among those that share a global batch."""
        return self.engine.group.group_rank

    @property
    def dp_size(self) -> int:
        """Ranks that share a global batch [count]."""
        return self.engine.group.size

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had been asked to stop when the last step began; equal on every rank."""
        return self.stepper.stop_requested

    def told(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Return a context out of which an exception is told to the ranks that would wait for this one."""
        return self.world.calls.during(kind, self._number)

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step.

        Under `torch.autocast`, forward and loss are cast and nothing else is; all ranks are under the same, or none.
        Gradients stay readable until the next step begins: as ``parameter.grad`` where ranks hold whole ones, and by
        `full_gradients` under every plan.

        Args:
            batch: This rank's share of the global batch (see `split_batch`), or None where it has no sample: a mapping
                (keywords), or a pair ``(inputs, targets)``.

        Returns:
            Loss and gradient norm of the whole global batch, equal on every rank.

        Raises:
            NonFiniteError: A loss or gradient is NaN or Inf, on any rank; parameters are those of before the step.
            CorruptionError: Ranks hold or compute something else than they must.
            ApplyError: The model was changed behind the plan's back, the batch cannot be cut, or ranks that share layers were
                given different ones.
            UserCodeError: Code of the user's raised on another rank.
            LostPeerError: Another rank is gone.
        """
        number = self.num_steps
        switch = self.engine.switch
        with switch.plain(), self.told("step"), self.stepper.casts.taken_in():
            raise_error(self.saving)
            switch.moment.steps += 1
            result = self.stepper.step(
                batch,
                wants_stop=self.world.stop_requested(),
                on_phase=lambda phase: self.world.report_progress(number, phase),
            )
        self.num_steps += 1
        return result

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Return ``{"loss", "weight", "num_samples", "num_tokens"}`` of a global batch, without training on it.

        The loss of several batches is the mean of their losses, weighted by "weight".

        The module is in eval mode meanwhile; no gradient is touched, and torch's generators are put back. Buffers that the model
        writes even so follow rank 0, as they do after a step.

        Args:
            batch: This rank's share, or None; as for `step`.
        """
        with self.engine.switch.plain(), self.told("evaluate"), self.stepper.casts.taken_in():
            return self.stepper.evaluate(batch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for these inputs, on this rank alone; "data_parallel" gathers its devices'.

        Under tensor parallelism the ranks that share layers call this together, with the same inputs; under ZeRO-3 all do.

        It is for outputs. `step` trains: a backward from here would exchange nothing, so the optimizer refuses to step.
        """
        with self.engine.switch.plain(), self.told("forward"):
            outputs = self.stepper.forward(args, kwargs)
        has_graph = self.engine.outputs_have_graph
        is_trained = any(parameter.requires_grad for parameter in self.module.parameters())
        return outputs if has_graph or not is_trained else without_backward(outputs, str(self._plan))

    def full_state_dict(self) -> dict[str, Any]:
        """Return the plain model's state dict: its own FQNs, full CPU tensors, copies; on every rank."""
        module = self.module
        if type(module).__name__ == "OptimizedModule":  # torch.compile's wrapper is not the user's model
            module = module.get_submodule("_orig_mod")
        with self.whole_parameters():
            return {
                name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in module.state_dict().items()
            }

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the last step's gradients as one device would have them, after clipping; every rank calls it.

        Returns:
            FQN -> the whole gradient, or None where the parameter has none. Valid until the next step begins.
        """
        with self.engine.switch.plain(), self.told("gradients"):
            return self.engine.full_gradients()

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Have every parameter of the module hold its whole value inside; every rank enters it.

        For reading, copying and writing: what is written inside, alike on every rank, stays. Gradients are not whole here: see
        `full_gradients`.
        """
        with (
            self.told("whole"),
            self.engine.switch.plain(),
            self.engine.whole_parameters(),
            self.engine.switch.whole(),
            contextlib.nullcontext() if self._state_guard is None else self._state_guard.whole(),
        ):
            yield

    def held_bytes(self) -> dict[str, int]:
        """Return the memory that this rank holds for "parameters", "gradients" and "optimizer" state, as it is now [bytes].

        Memory that several tensors share counts once. Gradients are there from `step` until the next one begins.
        """
        with self.engine.switch.plain():
            held = {
                kind: [tensor.detach() for tensor in tensors] for kind, tensors in self.engine.held_tensors().items()
            }
            entries = [] if self.optimizer is None else list(self.optimizer.state.values())
            state = [value for entry in entries for value in entry.values()]
        held["optimizer"] = [value for value in state if isinstance(value, torch.Tensor)]
        return {kind: _memory_bytes(tensors) for kind, tensors in held.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the module's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's (FQN, parameter) pairs."""
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> ParallelModel:
        """Set training mode, or evaluation mode, as nn.Module.train does; return this model."""
        self.module.train(mode)
        return self

    def eval(self) -> ParallelModel:
        """Set evaluation mode, as nn.Module.eval does; return this model."""
        return self.train(mode=False)

    def close(self) -> None:
        """Release hooks and threads; the module is a plain one again. Nothing is exchanged.

        After ZeRO-3 its values are with the ranks that hold them, and it reads as NaN: take `full_state_dict` before.
        """
        wait_for(self.saving)
        self.engine.switch.close()
        self.stepper.close()
        if self._state_guard is not None:
            self._state_guard.close()
        self.engine.close()
        if self._recompute is not None:
            self._recompute.close()

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        has_parts = self.engine.holds_parts
        self.close()
        if has_parts and isinstance(error, RuntimeError) and says_written_into_expanded(error):
            raise ApplyError(
                f"a script wrote into a parameter under the plan '{self.plan}', where a rank has only a part of its values",
                fix=WRITE_WHOLE,
            ) from error
