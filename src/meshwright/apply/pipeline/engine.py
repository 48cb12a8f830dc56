"""Engine of pipeline parallelism, around an engine of data or tensor parallelism on this rank's own layers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.apply.first_look import tell_everyone
from meshwright.apply.nested import OuterEngine
from meshwright.apply.pipeline.inspection import BoundaryInspection
from meshwright.apply.pipeline.ownership.broadcasts import Collector
from meshwright.apply.pipeline.ownership.early_copies import EarlyCopies
from meshwright.apply.pipeline.ownership.holding import Holding, keep_only
from meshwright.apply.pipeline.ownership.tied import TiedGradients
from meshwright.apply.pipeline.ownership.whole_buffers import Homes, modules_around, spread_buffers
from meshwright.apply.pipeline.p2p import Post
from meshwright.apply.pipeline.stage import Stage
from meshwright.apply.pipeline.tensor_cut import closed_units, restrict, units_together, without_spanning
from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.tracing.observation import observe_undisturbed
from meshwright.apply.pipeline.tracing.stage_map import StageMap, cut
from meshwright.apply.pipeline.walking.draws import Draws
from meshwright.apply.pipeline.walking.own_state import OwnState
from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins
from meshwright.apply.pipeline.walking.unit_hooks import Interception, UnderWay, refuse_compiled
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.schedule import ActionKind, PipelineSchedule
from meshwright.spec import Plan

__all__: list[str] = []

T = TypeVar("T")

_LIVES = itertools.count()  # pipelines of this process so far; rank 0's number is that of all ranks


class PipelineEngine(OuterEngine):
    """A model whose layer calls are assigned to stages.

    `inner` is the engine for what this rank holds; this one adds the exchange between stages. The step runs a schedule on it
    (`apply/pipeline/executor.py`) instead of one micro-batch after the other.

    Args:
        module: The user's module, on `device`.
        group: The data-parallel ranks: those with the same stages.
        device: This rank's device.
        plan: Schedule and stages.
        pp_group: The ranks that hold one copy of the model between them, in the order of the stages.
        everyone: All ranks.
        make_inner: Builds the data-parallel engine of this rank's layers, once the module holds only those.
        tensor: The engine of tensor parallelism, which builds that one, or None.
        make_group: (places in pp_group) -> the group of the ranks there; every rank calls it.
        loss_group: The ranks over which losses are summed: every stage of every share of the batch, once.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Communicator,
        device: torch.device,
        plan: Plan,
        *,
        pp_group: Communicator,
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
            f"pp={pp_group.size} reads the order of the model's layers off its first batch, and none has come yet",
        )
        refuse_compiled(module)
        self.pp_group = pp_group
        self._loss_group = loss_group
        self._plan = plan
        self._make_inner = make_inner
        self._tensor = tensor
        self._make_group = make_group
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedules: dict[int, PipelineSchedule] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._interception: Interception
        self._inspection: BoundaryInspection
        self._holding: Holding
        self._collector: Collector
        self._draws: Draws
        self._tied: TiedGradients
        self._under_way = UnderWay()
        self._copies_before = EarlyCopies(module)
        self._stages: dict[int, Stage] = {}
        self._shapes: Shapes
        self._own_state: OwnState | None = None
        self._homes: Homes
        self.stage_map: StageMap
        schedule = self.schedule(1)
        self._post = Post(
            pp_group, schedule.rank_of_stage, plan.num_stages, schedule.stages_of_rank(pp_group.group_rank)
        )
        if tensor is None:
            make_copies_equal(self.parameters, everyone)
            make_copies_equal(module.buffers(), everyone)

    def schedule(self, num_micro_batches: int) -> PipelineSchedule:
        """Return the schedule for this number of micro-batches."""
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
        return self.pp_group.size * (1 if self._tensor is None else self._tensor.copies)

    @property
    def loss_group(self) -> Communicator:
        return self._loss_group

    def prepare(self, run: Callable[[nn.Module], Any] | None) -> None:
        """Trace a forward and assign its calls to stages, once; every rank calls this. One that has a batch traces for all.

        Raises:
            ApplyError: No rank has a batch, or the model cannot be cut into so many stages.
        """
        if self.is_prepared:
            return
        layout = None if self._tensor is None else self._tensor.find_layout(run)
        closed = set[str]() if layout is None else closed_units(layout)
        look = lambda run: self._observe(run, closed).to_json()  # noqa: E731
        told = tell_everyone(self._everyone, self.device, self.module, run, look)
        flow = Flow.from_json(told)
        flow.refuse()
        self._copies_before.end()
        self._place(flow, None if layout is None else without_spanning(layout, flow.units))

    def _observe(self, run: Callable[[nn.Module], Any], closed: set[str]) -> Flow:
        # What is cut afterwards must not have a graph, which knows parameters' shapes.
        is_cut = self._tensor is not None
        return observe_undisturbed(self.module, run, num_stages=self._plan.num_stages, closed=closed, on_copy=is_cut)

    def _place(self, flow: Flow, layout: TensorLayout | None) -> None:
        together = [] if layout is None else units_together(layout, flow.units)
        schedule = self.schedule(1)
        ranks = [schedule.rank_of_stage(stage) for stage in range(self._plan.num_stages)]
        stage_map = cut(self.module, flow, ranks, self._plan.stages, together)
        self.stage_map = stage_map
        own = schedule.stages_of_rank(self.pp_group.group_rank)
        around = modules_around(self.module, flow.units)
        self._homes = Homes(self.module, [child for _, child in around], self.group, self.device)
        twins = {} if layout is None else make_twins(self.module, flow.units)
        self._shapes = Shapes(twins, lambda _: around, flow.draws_python)
        seed, life = self.pp_group.all_gather_json([torch.initial_seed(), next(_LIVES)], device=self.device)[0]
        self._post.life = life * 37  # failures count on from here: not into the lives of the next pipeline
        self._draws = Draws(seed, self.device, apart=flow.draws, python=bool(flow.draws_python))
        self._own_state = OwnState([module for _, module in around], own) if len(own) > 1 else None
        self._stages = {
            index: Stage(
                index,
                self.module,
                stage_map,
                shapes=self._shapes,
                post=self._post,
                draws=self._draws,
                under_way=self._under_way,
                own_state=self._own_state,
            )
            for index in own
        }
        self._inspection = BoundaryInspection(self._stages.values())
        self._holding = Holding(self.module, stage_map.holders, own)
        self.switch.on_state = self._holding.on_state
        places = {
            name: sorted({schedule.rank_of_stage(stage) for stage in held}) for name, held in stage_map.holders.items()
        }
        self._collector = Collector(self.pp_group, self.device, places)
        self._tied = TiedGradients.over(places, self._holding.all, self._make_group, self.pp_group.rank)
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
        held = self._holding.held_values(self._inner.held_parts(self.switch.moment))
        self._holding.learn(self.pp_group.all_gather_json(held, device=self.device))
        self._interception = Interception(self.module, flow.units, [child for _, child in around], self._under_way)

    def detail(self, plan: Plan) -> Plan:
        """Return the plan with the stage of each layer and each stage's share of the work."""
        if self._inner is None:
            return plan
        shares = ", ".join(f"{share:.1%}" for share in self.stage_map.shares)
        num_layers = len(self.stage_map.stages)
        lines = [
            f"pp={self.pp_group.size} cuts {num_layers} layers into {plan.num_stages} stages: {shares} of the work"
        ]
        if self._tied.names:
            lines.append(f"used on several stages, gradients summed: {', '.join(self._tied.names[:4])}")
        detailed = plan.replace(stages=self.stage_map.stages, reasons=(*plan.reasons, *lines))
        return self._inner.detail(detailed)

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, Tensor]]]]:
        return [*super().copies_of_state(), *self._tied.copies()]

    # -- a schedule's actions -----------------------------------------------------------------------------------

    def run_forward(self, stage: int, micro_batch: int, run: Callable[[nn.Module], T], *, in_halves: bool) -> T | None:
        """Run a stage's part of a forward; tensors of other stages are stand-ins in what is returned.

        None where the loss reads values that other stages hold. `in_halves` says whether its backward will run in halves.
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
        """Run a stage's backward, or the first half of it; `root` is the loss and its gradient, on the stage that computes it."""
        if kind is ActionKind.WEIGHT_GRAD:
            self._stages[stage].run_rest(micro_batch)
        else:
            if self._tensor is not None:
                self._tensor.set_streams(self._streams.pop((stage, micro_batch)))
            self._stages[stage].backward(micro_batch, root)

    def begin_schedule(self, num_micro_batches: int) -> None:
        """Check that the ranks of the pipeline have equally many micro-batches; else a later stage would wait forever.

        Raises:
            ApplyError: They have not.
        """
        if self._post.has_notes(self.device):
            self._post.compare_counts(num_micro_batches)

    def tell_failure(self, num_micro_batches: int) -> None:
        """Tell the other stages, which may be waiting for this rank, that it has failed."""
        if self._post.has_notes(self.device):
            self._post.fail(num_micro_batches)
        self._post.forget()

    # -- the step -----------------------------------------------------------------------------------------------

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def accept_groups(self, optimizer: torch.optim.Optimizer) -> ApplyError | None:
        if not self.is_prepared:
            return super().accept_groups(optimizer)
        return ApplyError(
            f"groups of {type(optimizer).__name__} were changed after pp={self.pp_group.size} had assigned the parameters to "
            "stages: module.parameters() lists only this rank's, so a choice of parameters by position differs between ranks",
            fix="give apply_plan all groups from the start, and switch requires_grad or lr of a group between steps",
        )

    def begin_step(self) -> None:
        self._post.begin()
        self._streams.clear()
        for stage in self._stages.values():
            stage.forget()
        self._draws.begin_step()
        if self._own_state is not None:
            self._own_state.begin_step()
        self.inner.begin_step()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs, on every rank of the pipeline."""
        self.prepare(lambda module: module(*args, **kwargs))
        self.begin_forward()
        with torch.no_grad():
            with self._collector.together(lambda: self.tell_failure(1)):
                found = {
                    index: stage.forward(0, lambda module: module(*args, **kwargs))
                    for index, stage in sorted(self._stages.items())
                }
            self._post.finish()
            home_of = next(iter(self._stages.values())).home_of
            outputs = self._collector.outputs(found, home_of, self.schedule(1).rank_of_stage)
        self.end_forward()
        return outputs

    def finish_gradients(self, scale: float) -> None:
        self._post.finish()
        if self._own_state is not None:
            self._own_state.end_step()
        sums_first = self._plan.zero and self._plan.dp > 1  # there a rank is left with pieces
        steps = [self._tied.sum, lambda: self.inner.finish_gradients(scale)]
        for run in steps if sums_first else reversed(steps):
            run()

    def gradient_squares(self, skipped: frozenset[int], *, exact: bool) -> Tensor:
        squares = self.inner.gradient_squares(skipped | self._tied.counted_elsewhere, exact=exact)
        self.pp_group.all_reduce(squares)
        return squares

    def sync_buffers(self) -> None:
        self._homes.agree()
        super().sync_buffers()

    def begin_inspection(self, number: int) -> str | None:
        """Start checking that stages receive what was sent, and one part of the inner engine."""
        self.inner.begin_inspection(number)
        # Equal on all ranks, whether or not there is a part to inspect on each.
        return self._inspection.begin() if self._post.has_notes(self.device) else "parts of stages"

    def end_inspection(self) -> Sequence[Finding]:
        return [*self.inner.end_inspection(), *self._inspection.end()]

    # -- whole values -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Give the module every parameter and buffer in full, on every rank, inside the context."""
        if self._inner is None:
            yield
            return
        with self._interception.suspended(), self._inner.whole_parameters(), self._copies_before.whole():
            rank_of_stage = self.schedule(1).rank_of_stage
            spread_buffers(self.module, self.stage_map, self._collector, rank_of_stage, self._stages)
            with self._holding.whole(self._collector.values(self._holding.all)):
                yield

    def refresh_trainable(self) -> None:
        """Exchange changes of `requires_grad`: a rank learns those of parameters it does not hold from the ranks that do."""
        told: dict[str, bool] = {}
        for states in self.pp_group.all_gather_json(self.trainable_states(), device=self.device):
            told |= states
        self._holding.set_trainable(told)
        self._shapes.forget(told)
        self.inner.refresh_trainable()

    def trainable_states(self) -> dict[str, bool]:
        """Return `requires_grad` of each parameter that this rank holds, by FQN."""
        return {name: p.requires_grad for name, p in self._holding.all.items() if name not in self._holding.absent}

    def held_parts(self, moment: RunMoment) -> list[tuple[Tensor, ShardFacts]]:
        return [*super().held_parts(moment), *(self._holding.held_parts(moment) if self.is_prepared else ())]

    def gradient_terms(self) -> set[int]:
        tied = self._tied.names if self.is_prepared else ()
        return super().gradient_terms() | {id(self._holding.all[name]) for name in tied}

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self._collector.gradients(self._holding.all, self.inner.full_gradients())

    def begin_forward(self) -> None:
        self._post.begin()
        self._draws.begin_forward()
        if self._own_state is not None:
            self._own_state.begin_step()
        self.inner.begin_forward()

    def end_forward(self) -> None:
        self._post.finish()
        if self._own_state is not None:
            self._own_state.end_step()
        super().end_forward()

    def close(self) -> None:
        if self._inner is not None:
            self._interception.close()
            self._inner.close()
            self._holding.close()
