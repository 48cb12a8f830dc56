"""Pipeline parallelism: stages on other ranks, an engine of data or tensor parallelism on this rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.apply.buffers import BufferSnapshot
from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.engine import Engine
from meshwright.apply.first_look import tell_everyone
from meshwright.apply.outer import OuterEngine
from meshwright.apply.pipeline import stages
from meshwright.apply.pipeline.collect import Collector
from meshwright.apply.pipeline.draws import Draws
from meshwright.apply.pipeline.flow import Flow, observe
from meshwright.apply.pipeline.holding import Holding, keep_only
from meshwright.apply.pipeline.interception import Interception, UnderWay
from meshwright.apply.pipeline.post import Post
from meshwright.apply.pipeline.shapes import Shapes, make_twins
from meshwright.apply.pipeline.stage import Stage
from meshwright.apply.pipeline.tensor_cut import closed_units, restrict, units_together, without_spanning
from meshwright.apply.pipeline.tied import TiedGradients
from meshwright.apply.tensor.copies import copy_module
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.region import TensorLayout
from meshwright.comm.communicator import Communicator
from meshwright.describe.tree import map_tensors, tensors_in
from meshwright.errors import ApplyError
from meshwright.schedule import ActionKind, PipelineSchedule
from meshwright.spec import Plan

__all__: list[str] = []

T = TypeVar("T")


class PipelineEngine(OuterEngine):
    """A model whose calls are dealt out to stages.

    `inner` is the engine on what this rank holds; this one adds what stages exchange. The step runs a schedule on it
    (`run/schedule.py`) instead of one micro-batch after the other.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks: those with the same stages.
        device: This rank's device.
        plan: Schedule and stages.
        pipe: The ranks that hold one copy of the model between them, in the order of the stages.
        everyone: All ranks.
        make_inner: Gives the engine of data parallelism on this rank's part, once the module has been reduced to it.
        tensor: The engine of tensor parallelism, which makes that one, or None.
        make_group: (places on the pipe) -> the group of the ranks there; every rank calls it.
        loss_group: The ranks over which losses are summed: every stage of every share of the batch, once.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        device: torch.device,
        plan: Plan,
        *,
        pipe: Communicator,
        everyone: Communicator,
        make_inner: Callable[[], Engine],
        tensor: TensorEngine | None,
        make_group: Callable[[Sequence[int]], Communicator],
        loss_group: Communicator,
    ) -> None:
        super().__init__(
            module,
            group,
            device,
            everyone,
            f"pp={pipe.size} reads the order of the model's layers off its first batch, and none has come yet",
        )
        self.pipe = pipe
        self._loss_group = loss_group
        self._plan = plan
        self._make_inner = make_inner
        self._tensor = tensor
        self._make_group = make_group
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedules: dict[int, PipelineSchedule] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._interception: Interception
        self._holding: Holding
        self._collector: Collector
        self._draws: Draws
        self._tied: TiedGradients
        self._under_way = UnderWay()
        self._stages: dict[int, Stage] = {}
        self.stage_map: stages.StageMap
        self._post = Post(pipe, self.schedule(1).rank_of_stage, plan.num_stages)
        if tensor is None:
            make_copies_equal(self.parameters, everyone)
            make_copies_equal(module.buffers(), everyone)

    def schedule(self, num_micro_batches: int) -> PipelineSchedule:
        """Return the order of work for so many micro-batches."""
        found = self._schedules.get(num_micro_batches)
        if found is None:
            plan = self._plan
            found = PipelineSchedule.build(
                plan.schedule, num_ranks=plan.pp, num_micro_batches=num_micro_batches, virtual=plan.virtual
            )
            self._schedules[num_micro_batches] = found
        return found

    # -- the cut ------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        return self.pipe.size * (1 if self._tensor is None else self._tensor.copies)

    @property
    def loss_group(self) -> Communicator:
        return self._loss_group

    def prepare(self, run: Callable[[nn.Module], Any] | None) -> None:
        """Find the calls and deal them out, once. Every rank comes here; one that has a batch looks, and tells the others.

        Raises:
            ApplyError: No rank has a batch, or the model cannot be cut into so many stages.
        """
        if self.is_prepared:
            return
        layout = None if self._tensor is None else self._tensor.find_layout(run)
        closed = set[str]() if layout is None else closed_units(layout)
        told = tell_everyone(self._everyone, self.device, run, lambda run: self._observe(run, closed).to_json())
        flow = Flow.from_json(told)
        if flow.reads:
            raise ApplyError(
                f"the forward reads numbers between its layers: {'; '.join(flow.reads[:3])}; every stage would need them before "
                "they are computed",
                fix="decide by the inputs, or inside a layer; or use pp=1",
            )
        self._place(flow, None if layout is None else without_spanning(layout, flow.units))

    def _observe(self, run: Callable[[nn.Module], Any], closed: set[str]) -> Flow:
        buffers = BufferSnapshot(self.module)
        # What is cut afterwards must not have a graph, which knows parameters' shapes.
        module = self.module if self._tensor is None else copy_module(self.module, Tensor.detach)
        try:
            return observe(module, run, num_stages=self._plan.num_stages, closed=closed)
        finally:
            buffers.restore()

    def _place(self, flow: Flow, layout: TensorLayout | None) -> None:
        together = [] if layout is None else units_together(layout, flow.units)
        schedule = self.schedule(1)
        ranks = [schedule.rank_of_stage(stage) for stage in range(self._plan.num_stages)]
        stage_map = stages.cut(self.module, flow, ranks, self._plan.stages, together)
        self.stage_map = stage_map
        own = schedule.stages_of_rank(self.pipe.group_rank)
        shapes = Shapes({} if layout is None else make_twins(self.module, flow.units))
        seed = self.pipe.all_gather_json(torch.initial_seed(), device=self.device)[0]
        self._draws = Draws(seed, self.device, apart=flow.draws)
        self._stages = {
            index: Stage(
                index,
                self.module,
                stage_map,
                shapes=shapes,
                post=self._post,
                draws=self._draws,
                under_way=self._under_way,
            )
            for index in own
        }
        self._holding = Holding(self.module, stage_map.holders, own)
        places = {
            name: sorted({schedule.rank_of_stage(stage) for stage in held}) for name, held in stage_map.holders.items()
        }
        self._collector = Collector(self.pipe, self.device, places)
        groups = {
            held: self._make_group(held) for held in sorted({tuple(held) for held in places.values() if len(held) > 1})
        }
        self._tied = TiedGradients(
            {name: (groups[tuple(held)], self._holding.all[name]) for name, held in places.items() if len(held) > 1},
            self.pipe.rank,
        )
        self.parameters = list(self.module.parameters())
        if self._optimizer is not None:
            keep_only(self._optimizer, self.parameters)
        if self._tensor is None or layout is None:
            self._inner = self._make_inner()
            self._inner.adopt_optimizer(self._optimizer)
        else:
            tensors = dict(self.module.named_parameters(remove_duplicate=False))
            tensors |= dict(self.module.named_buffers(remove_duplicate=False))
            self._tensor.adopt_optimizer(self._optimizer)
            self._tensor.cut(restrict(layout, stage_map, own, tensors))
            self._inner = self._tensor
        self._interception = Interception(self.module, flow.units, self._under_way)

    def detail(self, plan: Plan) -> Plan:
        """Return the plan with the stage of each layer, and each stage's share of the work."""
        if self._inner is None:
            return plan
        shares = ", ".join(f"{share:.1%}" for share in self.stage_map.shares)
        lines = [
            f"pp={self.pipe.size} cuts {len(self.stage_map.stages)} layers into {plan.num_stages} stages: {shares} of the work"
        ]
        if self._tied.names:
            lines.append(f"used on several stages, gradients summed: {', '.join(self._tied.names[:4])}")
        detailed = plan.replace(stages=self.stage_map.stages, reasons=(*plan.reasons, *lines))
        return self._inner.detail(detailed)

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, Tensor]]]]:
        return [*super().copies_of_state(), *self._tied.copies()]

    # -- a schedule's actions -----------------------------------------------------------------------------------

    def run_forward(self, stage: int, micro_batch: int, run: Callable[[nn.Module], T], *, in_halves: bool) -> T | None:
        """Run a stage's part of a forward; tensors that other stages compute are fake in what is returned.

        None where the loss reads numbers that other stages have. `in_halves` says how its backward will be run.
        """
        result = self._stages[stage].forward(micro_batch, run, in_halves=in_halves)
        if self._tensor is not None and torch.is_grad_enabled():
            self._streams[stage, micro_batch] = self._tensor.streams()
        return result

    @property
    def owes_nothing_to_the_loss(self) -> bool:
        walk = self._under_way.walk
        return walk is not None and walk.owes_nothing_to_the_loss

    def computes(self, stage: int, tensor: Tensor) -> bool:
        """Tell whether a tensor that `run_forward` returned is the stage's own."""
        return self._stages[stage].home_of(tensor) == stage

    def run_backward(
        self, stage: int, micro_batch: int, root: tuple[Tensor, Tensor | None] | None, kind: ActionKind
    ) -> None:
        """Run a stage's part of a backward, or a half of it; `root` is the loss and its gradient, where it is computed."""
        if kind is ActionKind.WEIGHT_GRAD:
            self._stages[stage].run_rest(micro_batch)
        else:
            if self._tensor is not None:
                self._tensor.set_streams(self._streams.pop((stage, micro_batch)))
            self._stages[stage].backward(micro_batch, root)

    # -- the step -----------------------------------------------------------------------------------------------

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def begin_step(self) -> None:
        self._post.forget()
        self._streams.clear()
        for stage in self._stages.values():
            stage.forget()
        self._draws.begin_step()
        self.inner.begin_step()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs, on every rank of the pipeline."""
        self.prepare(lambda module: module(*args, **kwargs))
        with torch.no_grad():
            found = {
                index: stage.forward(0, lambda module: module(*args, **kwargs))
                for index, stage in sorted(self._stages.items())
            }
            self._post.finish()
            return self._whole_outputs(found)

    def _whole_outputs(self, found: Mapping[int, Any]) -> Any:
        """Give every rank the tensors that some stage computed."""
        own = {index: list(tensors_in(tree)) for index, tree in found.items()}
        anyone, tree = next(iter(found.items()))
        place = iter(range(len(own[anyone])))

        def whole(_: Tensor) -> Tensor:
            index = next(place)
            home = self._stages[anyone].home_of(own[anyone][index])
            return self._collector.tensor(
                own[home if home in own else anyone][index], self.schedule(1).rank_of_stage(home)
            )

        return map_tensors(tree, whole)

    def finish_gradients(self, scale: float) -> None:
        self._post.finish()
        if self._plan.zero and self._plan.dp > 1:  # there a rank is left with pieces
            self._tied.sum()
            self.inner.finish_gradients(scale)
        else:
            self.inner.finish_gradients(scale)
            self._tied.sum()

    def gradient_squares(self, skipped: frozenset[int], *, exact: bool) -> Tensor:
        squares = self.inner.gradient_squares(skipped | self._tied.counted_elsewhere, exact=exact)
        self.pipe.all_reduce(squares)
        return squares

    # -- whole values -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Have the module whole and plain inside: every parameter and buffer, on every rank."""
        if self._inner is None:
            yield
            return
        with self._interception.suspended(), self._inner.whole_parameters():
            self._spread_buffers()
            with self._holding.whole(self._collector.values(self._holding.all)):
                yield

    def _spread_buffers(self) -> None:
        """Give every rank each unit's buffers as the rank has them that runs its last call."""
        schedule = self.schedule(1)
        for name, calls in self.stage_map.calls.items():
            for buffer in self.module.get_submodule(name).buffers():
                if buffer.numel():
                    buffer.copy_(self._collector.tensor(buffer, schedule.rank_of_stage(calls[-1])))

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self._collector.gradients(self._holding.all, self.inner.full_gradients())

    def begin_forward(self) -> None:
        self._post.forget()
        self._draws.begin_forward()
        self.inner.begin_forward()

    def end_forward(self) -> None:
        self._post.finish()
        self.inner.end_forward()

    def close(self) -> None:
        if self._inner is not None:
            self._interception.close()
            self._inner.close()
            self._holding.close()
