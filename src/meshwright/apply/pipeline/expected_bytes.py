"""Expected bytes of a pipeline rank in one step, from one forward of the whole model on fake tensors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import PlainCheckpoints
from meshwright.apply.data.expected_bytes import dense_gradients
from meshwright.apply.forecast import Forecast, SeenStep
from meshwright.apply.modules.copies import copy_module
from meshwright.apply.pipeline.tracing.functions import METADATA, writes_to
from meshwright.apply.pipeline.tracing.stage_map import StageMap, latest_of
from meshwright.apply.pipeline.walking.stand_ins import (
    FAKE_MODE,
    Meta,
    StageValue,
    make_fake,
    mark,
    value_of,
    values_in,
)
from meshwright.describe.batches import call_model
from meshwright.describe.function_caches import no_cached_tensors
from meshwright.traffic import ring_gradient_bytes
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlaces:
    """Where a pipeline has put what."""

    stage_map: StageMap
    """Which stage runs what."""
    rank_of_stage: Callable[[int], int]
    """Stage -> place of its rank on the pipe."""
    rank: int
    """This rank's place."""


class PipelineForecast(Forecast):
    """Stages: what passes between them, gradients of tied weights, and what the engine inside sends for what a rank holds.

    Args:
        module: The user's module.
        device: This rank's device.
        tensor: The forecast of the engine that cuts the layers inside of stages, which watches the first step; or None.
        inside: Gives the places, and the forecast of the engine inside, once the stages are known.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        tensor: Forecast | None,
        inside: Callable[[], tuple[StagePlaces, Forecast]],
    ) -> None:
        self._module = module
        self._device = device
        self._tensor = tensor
        self._inside = inside
        self._inner = Forecast()
        self._tied = 0.0
        self._places: StagePlaces | None = None
        self._step: SeenStep | None = None

    def end_watching(self) -> None:
        if self._tensor is not None:
            self._tensor.end_watching()

    def learn(self, step: SeenStep) -> None:
        self._step = step
        self._places, inner = self._inside()
        self._inner = self._tensor or inner
        self._inner.learn(step)
        self._tied = self._tied_bytes(self._places)

    def _tied_bytes(self, places: StagePlaces) -> float:
        """Return what this rank sends for gradients of weights of which other stages' ranks have a copy [bytes]."""
        sent = 0.0
        for name, parameter in dense_gradients(self._module).items():
            ranks = {places.rank_of_stage(stage) for stage in places.stage_map.holders[name]}
            sent += ring_gradient_bytes(parameter.nbytes, len(ranks))
        return sent

    def sent_bytes(self) -> float | None:
        if self._step is None or self._places is None:
            return None
        inner = self._inner.sent_bytes()
        crossing = None if inner is None else self._crossing_bytes(self._step, self._places)
        return None if inner is None or crossing is None else inner + self._tied + crossing

    def _crossing_bytes(self, step: SeenStep, places: StagePlaces) -> float | None:
        """Return what goes to other stages: what they take of this rank's, and gradients of what it takes of theirs.

        The module is whole again. None for a model that does not run on shapes.
        """
        crossing = Counter[tuple[int, int]]()
        autocast = torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=step.plan.precision == "bf16")
        try:
            # Buffers keep their values, and are copies: a forward may write over them.
            twin = copy_module(
                self._module, lambda t: make_fake(Meta.of(t)) if isinstance(t, nn.Parameter) else t.clone()
            )
            for part in step.splitter.cut(step.batch, step.plan.micro_batches):
                with autocast:
                    crossing += count_crossings(twin, places.stage_map, part)
        except Exception:  # noqa: BLE001 - any model may need numbers, which shapes have not
            return None
        ranks = [
            ((places.rank_of_stage(source), places.rank_of_stage(to)), size) for (source, to), size in crossing.items()
        ]
        sent = sum(size for (source, to), size in ranks if source == places.rank != to)
        return sent * step.num_samples / step.plan.num_shares / step.splitter.count(step.batch)


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
    plain = PlainCheckpoints(lambda: True, lambda _: None)
    with no_cached_tensors(module), torch.enable_grad(), plain, FAKE_MODE, observer:
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
            values = self._own((args, kwargs))
            stage = self._stage_map.place_of_call(name, self._calls[name], unit, [value.home for value in values])
            self._calls[name] += 1
            self._running = unit, self._take(values, stage)

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
        values = [] if self._running is not None or func in METADATA else self._own((args, kwargs))
        stage = latest_of([value.home for value in values])
        if stage is not None:
            self._take(values, stage)
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

    def _take(self, values: list[StageValue], stage: int) -> int:
        """Send tensors to the stage that computes something of them, and return it."""
        for value in values:
            if value.home is not None and value.home != stage and stage not in value.sent_to:
                value.sent_to.add(stage)
                self.crossing[value.home, stage] += value.any.nbytes
                if value.any.requires_grad:
                    self.crossing[stage, value.home] += value.any.nbytes
        return stage
