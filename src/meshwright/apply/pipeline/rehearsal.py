"""Rehearsal of a pipeline in one process: the cut and the bytes that its ranks will send, before there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.apply.data.expected_bytes import dense_gradients
from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.executor import make_schedule
from meshwright.apply.pipeline.expected_bytes import count_crossings
from meshwright.apply.pipeline.tracing.observation import observe
from meshwright.apply.pipeline.tracing.stage_map import cut
from meshwright.apply.pipeline.walking.stand_ins import Meta, make_fake
from meshwright.describe.batches import call_model
from meshwright.spec.plan import Plan
from meshwright.traffic import ring_gradient_bytes

__all__: list[str] = []


def foresee_messages(
    build_model: Callable[[], nn.Module], plan: Plan, batch: Any, loss_fn: Callable[[Any, Any], Any] | None
) -> list[float]:
    """Return what each pp rank sends to the others in a step, for as many micro-batches as the plan has [bytes].

    The model is built, and runs forward once. Its stages are those of the runtime: the same functions observe it, open its
    layers and deal them out.

    Args:
        build_model: Builds the model.
        plan: A plan with pp > 1 and tp = 1, whose layouts no search decides.
        batch: One micro-batch.
        loss_fn: The loss; None where it is the model's own.

    Raises:
        ApplyError: The model cannot be cut into so many stages.
        Exception: Whatever the user's code raises.
    """
    module = build_model()

    def run(model: nn.Module) -> Any:
        outputs = call_model(model, batch)
        if loss_fn is not None:
            loss_fn(outputs, batch)
        return outputs

    flow = observe(module, run, num_stages=plan.num_stages, closed=(), on_copy=False)
    flow.refuse()
    schedule = make_schedule(plan, plan.micro_batches)
    ranks = [schedule.rank_of_stage(stage) for stage in range(plan.num_stages)]
    stages = cut(module, flow, ranks, plan.stages)
    sent = Counter[int]()
    for parameter, held in [(p, stages.holders[name]) for name, p in dense_gradients(module).items()]:
        holders = {ranks[stage] for stage in held}
        for rank in holders:
            sent[rank] += ring_gradient_bytes(parameter.nbytes, len(holders))  # pyright: ignore[reportArgumentType]
    twin = copy_module(module, lambda t: make_fake(Meta.of(t)) if isinstance(t, nn.Parameter) else t.clone())
    for (source, to), size in count_crossings(twin, stages, batch).items():
        if ranks[source] != ranks[to]:
            sent[ranks[source]] += plan.micro_batches * size
    return [float(sent[rank]) for rank in range(plan.pp)]
