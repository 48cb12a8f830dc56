"""Expected bytes of a pipeline rank in one step, from one forward of the whole model on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import PlainCheckpoints
from meshwright.apply.data.expected_bytes import data_formula_bytes, dense_gradients
from meshwright.apply.engine import Engine
from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.apply.pipeline.tracing.functions import METADATA, writes_to
from meshwright.apply.pipeline.tracing.stage_map import StageMap
from meshwright.apply.pipeline.walking.stand_ins import (
    FAKE_MODE,
    Meta,
    StageValue,
    make_fake,
    mark,
    value_of,
    values_in,
)
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.expected_bytes import TokenWatch, tensor_part_bytes
from meshwright.describe.batches import BatchSplitter, call_model
from meshwright.spec.plan import Plan
from meshwright.traffic import ring_gradient_bytes
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []


def part_formula_bytes(
    engine: Engine, plan: Plan, batch: Any, num_samples: float, watch: TokenWatch | None
) -> float | None:
    """Return the bytes that a rank sends for its own parameters: over dp, over tp, and for weights tied over stages.

    Args:
        engine: What runs the stages, after a step; it is not closed yet.
        plan: The plan.
        batch: A batch as this rank gets it.
        num_samples: Samples in a step over all ranks, on average [count].
        watch: What counted the step that took this batch, where there is tp.

    Returns:
        The bytes [bytes]; None where there is no formula for a part of it.
    """
    if not isinstance(engine, PipelineEngine):
        return None
    inner, over_tp = engine.inner, 0.0
    if isinstance(inner, TensorEngine):
        exchanged = None if watch is None else tensor_part_bytes(inner, plan, batch, num_samples, watch)
        if exchanged is None:
            return None
        inner, over_tp = inner.inner, exchanged
    over_dp = data_formula_bytes(engine.module, inner, plan)
    return None if over_dp is None else _tied_bytes(engine) + over_tp + over_dp


def _tied_bytes(engine: PipelineEngine) -> float:
    """Return the bytes that this rank sends for gradients of weights of which other stages hold a copy [bytes]."""
    rank_of = engine.schedule(1).rank_of_stage
    sent = 0.0
    for name, parameter in dense_gradients(engine.module).items():
        ranks = {rank_of(stage) for stage in engine.stage_map.holders[name]}
        sent += ring_gradient_bytes(parameter.nbytes, len(ranks))
    return sent


def crossing_formula_bytes(
    engine: Engine, plan: Plan, splitter: BatchSplitter, batch: Any, num_samples: float
) -> float | None:
    """Return the bytes that a rank sends to other stages: its activations, and the gradients of the activations it receives.

    Args:
        engine: What ran the stages; its module is whole again.
        plan: The plan.
        splitter: How batches are counted and cut.
        batch: A batch as this rank gets it.
        num_samples: Samples in a step over all ranks, on average [count].

    Returns:
        The bytes [bytes]; None for a model that does not run on shapes.
    """
    if not isinstance(engine, PipelineEngine):
        return None
    own, rank_of = engine.pp_group.group_rank, engine.schedule(1).rank_of_stage
    autocast = torch.autocast(engine.device.type, dtype=torch.bfloat16, enabled=plan.precision == "bf16")
    crossing = Counter[tuple[int, int]]()
    try:
        # Buffers keep their values, and are copies: a forward may write over them.
        twin = copy_module(engine.module, lambda t: make_fake(Meta.of(t)) if isinstance(t, nn.Parameter) else t.clone())
        for part in splitter.cut(batch, plan.micro_batches):
            with autocast:
                crossing += count_crossings(twin, engine.stage_map, part)
    except Exception:  # noqa: BLE001 - any model may need numbers, which shapes have not
        return None
    sent = sum(size for (source, to), size in crossing.items() if rank_of(source) == own != rank_of(to))
    return sent * num_samples / plan.dp / splitter.count(batch)


def count_crossings(module: nn.Module, stage_map: StageMap, batch: Any) -> Counter[tuple[int, int]]:
    """Run a forward and return the bytes that it and its backward send from stage to stage.

    Args:
        module: The model, with parameters that are fake.
        stage_map: Which stage runs what.
        batch: A micro-batch.

    Returns:
        (stage, stage) -> bytes.
    """
    observer = _CrossingCounter(module, stage_map)
    with torch.enable_grad(), PlainCheckpoints(lambda: True, lambda _: None), FAKE_MODE, observer:
        call_model(module, map_tensors(batch, lambda tensor: make_fake(Meta.of(tensor))))
    return observer.crossing


class _CrossingCounter(TorchFunctionMode):
    """A forward of the whole model on fake tensors, each marked with the stage that would compute it.

    A layer's call runs on the layer's stage. Code between layers runs on the latest stage that computes one of its tensors. A
    tensor of another stage is sent there once, and its gradient comes back.
    """

    def __init__(self, module: nn.Module, stage_map: StageMap) -> None:
        super().__init__()
        self.crossing = Counter[tuple[int, int]]()
        self._stage_map = stage_map
        self._calls = Counter[str]()
        self._running: tuple[nn.Module, int] | None = None
        seen: set[int] = set()
        for name in stage_map.calls:
            unit = module.get_submodule(name)
            if id(unit) not in seen:  # one with several names has the first
                seen.add(id(unit))
                unit.register_forward_pre_hook(self._before(name), with_kwargs=True)
                unit.register_forward_hook(self._after)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(unit: nn.Module, args: Any, kwargs: Any) -> None:
            if self._running is not None:
                return
            stage = self._stage_map.stage_of(name, self._calls[name])
            self._calls[name] += 1
            self._running = unit, self._take((args, kwargs), stage)

        return hook

    def _after(self, unit: nn.Module, _args: Any, outputs: Any) -> Any:
        if self._running is None or self._running[0] is not unit:
            return None
        _, stage = self._running
        self._running = None
        # A view of its own: a unit may return its very input.
        return map_tensors(outputs, lambda tensor: self._mark(tensor.view_as(tensor), stage))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running is None and func not in METADATA and any(True for _ in self._own((args, kwargs))):
            stage = self._take((args, kwargs), 0)
            result = func(*args, **kwargs)
            for tensor in tensors_in((result, writes_to(func, args, kwargs))):
                self._mark(tensor, stage)
            return result
        return func(*args, **kwargs)

    def _own(self, tree: Any) -> list[StageValue]:
        return [value for value in values_in(tree) if value.owner is self]

    def _mark(self, tensor: Tensor, stage: int) -> Tensor:
        known = value_of(tensor)
        if known is not None and known.owner is self and known.home == stage:
            return tensor
        return mark(tensor, StageValue(self, stage, tensor, None))

    def _take(self, tree: Any, stage: int) -> int:
        """Count the sends of these tensors to the stage that uses them, at least `stage`, and return that stage."""
        values = self._own(tree)
        stage = max(stage, *(value.home or 0 for value in values), 0)
        for value in values:
            if value.home is not None and value.home != stage and stage not in value.sent_to:
                value.sent_to.add(stage)
                self.crossing[value.home, stage] += value.any.nbytes
                if value.any.requires_grad:
                    self.crossing[stage, value.home] += value.any.nbytes
        return stage
