"""apply_plan: a user's model laid over devices, from its arguments to the model that steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from meshwright._torch_private import leave_to_interpreter
from meshwright.apply.data.optimizer import refuse_coupled
from meshwright.apply.modules.synced_norms import refuse_torch_sync, synced_norms
from meshwright.apply.recompute.checkpointing import Recompute
from meshwright.apply.shards.optimizer_state import OptimizerState
from meshwright.apply.shards.state_dicts import StateGuard
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.apply.state.class_identity import refuse_class_identity
from meshwright.apply.state.iterators import refuse_iterators
from meshwright.describe.batches import BatchSplitter
from meshwright.mesh import MeshSpec
from meshwright.ranks.allocator import memory_returned
from meshwright.ranks.join import join_world, told_to_peers
from meshwright.run.assembly import (
    NamedOptimizerFactory,
    OptimizerFactory,
    build_engine,
    build_module,
    build_optimizer,
    choose_devices,
    require_world,
)
from meshwright.run.building.paged_build import PagedBuild
from meshwright.run.building.pretrained import with_pretrained
from meshwright.run.gate import OptimizerGate
from meshwright.run.global_draws import GlobalDraws
from meshwright.run.losses.loss import LossRule
from meshwright.run.model_backwards import refuse_backwards_in_models
from meshwright.run.model_collectives import hide_from_models, refuse_in_models
from meshwright.run.options import check_arguments, check_options
from meshwright.run.own_loop import refuse_shared
from meshwright.run.parallel_model import ParallelModel
from meshwright.run.sentinels.made import make_sentinels
from meshwright.run.sentinels.settings import DEFAULT_EVERY, check_sentinels
from meshwright.run.step import Stepper
from meshwright.spec import Plan
from meshwright.spec.supported import refuse_unbuilt

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}


@told_to_peers
@memory_returned()
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
    pretrained: str | os.PathLike[str] | None = None,
    sentinel_every: int = DEFAULT_EVERY,
    on_finding: Literal["stop", "warn"] = "stop",
    rng: Literal["torch", "global"] = "global",
    sync_batch_norm: bool = False,
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
        pretrained: A directory that transformers' ``save_pretrained`` wrote (safetensors), whose weights the model begins with.
        sentinel_every: Steps between two sentinels, which compare what several ranks hold, and a part of the strategy with one
            device; batches, learning rates and losses are compared in every step. 0 compares nothing [count].
        on_finding: What a difference does, before the optimizer: "stop" raises CorruptionError on every rank, "warn" logs it
            and adds it to the step's result.
        rng: What decides a forward's random numbers: "global", seed, step, the sample's place in the global batch, the call and
            the element's place, whatever the plan is; "torch", its generators, apart for each share of the batch.
        sync_batch_norm: Whether `model.step` normalises over the samples of all ranks in torch's BatchNorm layers, as one device
            does; else each rank normalises its own share. For plans of dp, ZeRO and tp with one micro-batch, without recompute.

    Returns:
        The model, ready for `step`.

    Raises:
        ApplyError: The plan does not fit the model, the devices or the ranks; ranks hold different models or plans.
        ConfigError: An argument is of another kind or out of range, the plan's line cannot be read, or `pretrained` has no
            weights in the safetensors format.
        CheckpointError: `pretrained` has the weights of another model, or a file is damaged.
    """
    world = join_world()
    check_arguments(build_model, plan, loss_fn, split)
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    check_options(max_grad_norm, non_finite, rng, seed)
    check_sentinels(sentinel_every, on_finding)
    refuse_unbuilt(plan)
    require_world(plan, world)
    hide_from_models()
    refuse_backwards_in_models()
    if world.world_size > 1:
        refuse_in_models()
    chosen = choose_devices(plan, devices, world.device)
    if pretrained is not None:
        build_model = with_pretrained(build_model, pretrained)
    pages = PagedBuild()
    module = build_module(build_model, seed, plan, world, pages)
    refuse_shared(module, str(plan))
    if world.rank == 0:
        _tell_what_does_nothing(plan, module)
    splitter = BatchSplitter(split)
    if plan.num_devices > 1 or plan.micro_batches > 1 or plan.micro_batch_size or plan.recompute != "none":
        refuse_iterators(module, [] if loss_fn is None else [loss_fn], str(plan))
        refuse_class_identity(module, [] if loss_fn is None else [loss_fn], plan)
    refuse_torch_sync(module, plan, chosen[0])
    recompute = None if plan.recompute == "none" else Recompute(module, plan.recompute)
    rule = LossRule(loss_fn, module, splitter)
    engine = build_engine(module, plan, world, chosen, splitter)
    rule.norms = synced_norms(module, plan, engine.group, is_wanted=sync_batch_norm)
    built = build_optimizer(optimizer, module, may_fuse=plan.dp > 1 or plan.tp > 1 or plan.pp > 1)
    options = {
        "seed": seed,
        "max_grad_norm": max_grad_norm,
        "non_finite": non_finite,
        "sentinel_every": sentinel_every,
        "on_finding": on_finding,
        "rng": rng,
    }
    place = (plan.mesh if plan.mode == "ranks" else MeshSpec(), world.rank)
    engine.use_switch(ShardSwitch(str(plan)))
    sentinels = make_sentinels(engine, place, built, loss_fn, options)
    splitter.watch = sentinels.shared_batches
    if built is not None and engine.deals_parameters_out:
        refuse_coupled(built, str(plan))
    gate = OptimizerGate(built)
    # `split=` may cut along any dim, and ranks join shares along the first.
    may_join = plan.mode == "ranks" and plan.batch == "auto" and (plan.dp == 1 or split is None)
    engine.adopt_optimizer(built)
    stepper = Stepper(
        engine,
        rule,
        splitter,
        optimizer=built,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        autocast=_AUTOCAST[plan.precision],
        max_grad_norm=max_grad_norm,
        non_finite=non_finite,
        sentinels=sentinels,
        gate=gate,
        draws=GlobalDraws(engine, module, seed, _sharers(plan, world.rank)) if rng == "global" else None,
        may_join=may_join and plan.dp > 1,
        may_join_parts=may_join and plan.pp > 1,
    )
    if recompute is not None:
        recompute.before = engine.before_layer
        recompute.ledger = world.ledger
        sentinels.recompute = recompute
    if engine.is_prepared:
        pages.finish()
    else:
        stepper.when_prepared(pages.finish)
    if example_batch is not None:
        stepper.prepare(example_batch)
    if engine.everyone.size > 1 or engine.num_replicas > 1:
        gate.shut(
            *(module, str(plan), engine.switch),
            takes_own_loops=engine.takes_own_loops,
            has_ranks=engine.everyone.size > 1,
        )
    axes = {name: getattr(plan, name) for name in ("tp", "pp") if getattr(plan, name) > 1}
    axes |= {"zero": plan.zero} if plan.zero and plan.dp > 1 else {}
    if axes and plan.mode == "ranks" and isinstance(built, torch.optim.Optimizer):
        engine.switch.optimizer = OptimizerState(built, module, engine.switch.moment, axes, world.rank)
    sentinels.end_draws()  # what a script sets from here on is compared
    leave_to_interpreter("meshwright")
    guard = StateGuard(engine, str(plan)) if plan.num_ranks > 1 else None
    return ParallelModel(plan, world, engine, stepper, recompute, state_guard=guard, pages=pages, seed=seed)


def _tell_what_does_nothing(plan: Plan, module: nn.Module) -> None:
    """Warn of words of a plan that are valid, and change nothing for this model."""
    if plan.zero and plan.dp == 1 and plan.offload == "none":
        _LOG.warning(
            "plan '%s': zero=%d shards over dp ranks, and dp=1: nothing is sharded. Fix: dp=2,zero=%d, or leave zero out",
            *(plan, plan.zero, plan.zero),
        )
    floats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if _AUTOCAST[plan.precision] is not None and floats == {torch.float64}:
        _LOG.warning(
            "plan '%s': precision=%s casts float32, and this model is float64: nothing is cast. Fix: a model in float32, "
            "or leave precision out",
            *(plan, plan.precision),
        )


def _sharers(plan: Plan, rank: int) -> Sequence[int]:
    """Return the ranks that share layers with one."""
    return next((group for group in plan.mesh.groups("tp") if rank in group), ()) if plan.mode == "ranks" else ()
