"""Engine of pipeline parallelism, around an engine of data or tensor parallelism on this rank's own layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.data.base import make_copies_equal
from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.apply.forecast import Forecast
from meshwright.apply.gradient_sums import GradientExit
from meshwright.apply.held_state import HeldPart
from meshwright.apply.modules.compiled import refuse_compiled
from meshwright.apply.nested import OuterEngine
from meshwright.apply.passes import StepWork, TermT
from meshwright.apply.pipeline.executor import ScheduleExecutor, make_schedule
from meshwright.apply.pipeline.expected_bytes import PipelineForecast, StagePlaces
from meshwright.apply.pipeline.first_forward import see_calls
from meshwright.apply.pipeline.ownership.early_copies import EarlyCopies
from meshwright.apply.pipeline.ownership.holding import keep_only
from meshwright.apply.pipeline.ownership.whole_buffers import buffers_elsewhere, spread_buffers
from meshwright.apply.pipeline.p2p import Post
from meshwright.apply.pipeline.placed import Placed
from meshwright.apply.pipeline.tensor_cut import restrict, see_calls_around, units_together
from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.walking.stage_forward import is_own
from meshwright.apply.pipeline.walking.unit_hooks import UnderWay, refuse_functional_call
from meshwright.apply.shards.facts import RunMoment, ShardFacts
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.apply.tensor.tensor_layout import TensorLayout
from meshwright.comm.communicator import Communicator
from meshwright.comm.told_errors import ends_exchanges
from meshwright.describe.batches import model_inputs
from meshwright.errors import ApplyError
from meshwright.spec import Plan

__all__: list[str] = []


class PipelineEngine(OuterEngine):
    """A model whose layer calls are assigned to stages.

    `inner` is the engine on what this rank holds; this one adds what stages exchange. Its `run` is a schedule
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
        make_channel: (number) -> a group of the same ranks as pp_group, of its own; every rank calls it.
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
        make_channel: Callable[[int], Communicator],
        loss_group: Communicator,
    ) -> None:
        super().__init__(
            module,
            group,
            device,
            everyone,
            f"pp={pp_group.size} reads the order of the model's layers off its first batch, and none has come yet",
        )
        refuse_compiled(module, "a pipeline has to follow the calls of the layers inside")
        self.pp_group = pp_group
        self._loss_group = loss_group
        self._plan = plan
        self._make_inner = make_inner
        self._tensor = tensor
        self._make_group, self._make_channel = make_group, make_channel
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule_of = functools.cache(functools.partial(make_schedule, plan))
        self._under_way, self._copies_before = UnderWay(), EarlyCopies(module)
        self._placed: Placed
        schedule = self._schedule_of(1)
        self._rank_of_stage, own = schedule.rank_of_stage, schedule.stages_of_rank(pp_group.group_rank)
        self._post = Post(pp_group, self._rank_of_stage, plan.num_stages, own)
        if tensor is None:
            make_copies_equal(self.parameters, everyone)
            make_copies_equal(module.buffers(), everyone)

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
        # On a copy what is cut afterwards: it must not have a graph, which knows parameters' shapes.
        num_stages, on_copy = self._plan.num_stages, self._tensor is not None
        given = (self._everyone, self.device, self.module, run)
        look = functools.partial(see_calls, *given, num_stages=num_stages, on_copy=on_copy)
        flow, layout = (look(closed=()), None) if layout is None else see_calls_around(layout, look, num_stages)
        self._copies_before.end()
        self._place(flow, layout)

    def _place(self, flow: Flow, layout: TensorLayout | None) -> None:
        self._post.open(self.device, self._make_channel)
        placed = self._placed = Placed(
            self.module,
            flow,
            self._plan,
            self._schedule_of(1),
            post=self._post,
            group=self.group,
            device=self.device,
            under_way=self._under_way,
            together=None if layout is None else units_together(layout, flow.units),
            make_group=self._make_group,
        )
        self.switch.on_state = placed.holding.on_state
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
            self._tensor.cut(restrict(layout, placed.stage_map, self._post.own, tensors))
            self._inner = self._tensor
        held = placed.holding.held_values(self._inner.held_parts(self.switch.moment))
        placed.holding.learn(self.pp_group.all_gather_json(held, device=self.device))
        placed.intercept()

    def detail(self, plan: Plan) -> Plan:
        """Return the plan with the stage of each layer and each stage's share of the work."""
        if self._inner is None:
            return plan
        stages, tied = self._placed.stage_map.stages, self._placed.tied.names
        shares = ", ".join(f"{share:.1%}" for share in self._placed.stage_map.shares)
        lines = [
            f"pp={self.pp_group.size} cuts {len(stages)} layers into {plan.num_stages} stages: {shares} of the work"
        ]
        lines += self._placed.stage_map.flow.reasons(self.module)
        if tied:
            lines.append(f"used on several stages, gradients summed: {', '.join(tied[:4])}")
        detailed = plan.replace(stages=stages, reasons=(*plan.reasons, *lines))
        return self._inner.detail(detailed)

    def copies_of_state(self) -> list[tuple[Communicator, list[tuple[str, Tensor]]]]:
        return [*super().copies_of_state(), *self._placed.tied.copies()]

    # -- what it says of itself ---------------------------------------------------------------------------------

    takes_own_loops = False

    @property
    def deals_parameters_out(self) -> bool:
        return True

    @property
    def exchanges_in_backward(self) -> bool:
        return False  # not while losses are summed, which is after all backward

    @property
    def num_walks(self) -> int:
        return self._plan.virtual

    def gives_own(self, name: str) -> bool:
        return self._placed.stage_map.runs_on(name, self._post.own) and self.inner.gives_own(name)

    def own_value(self, tensor: Tensor) -> Tensor | None:
        return self.inner.own_value(tensor) if is_own(tensor) else None

    def forecast(self) -> Forecast:
        def inside() -> tuple[StagePlaces, Forecast]:
            return StagePlaces(
                self._placed.stage_map, self._rank_of_stage, self.pp_group.group_rank
            ), self.inner.forecast()

        tensor = None if self._tensor is None else self._tensor.forecast()
        return PipelineForecast(self.module, self.device, tensor, inside)

    # -- the micro-batches --------------------------------------------------------------------------------------

    @property
    def agrees_first(self) -> bool:
        return True

    @property
    def owes_nothing_to_the_loss(self) -> bool:
        walk = self._under_way.walk
        return walk is not None and walk.owes_nothing_to_the_loss

    def run(self, work: StepWork[TermT]) -> list[TermT]:
        """Run the micro-batches through the stages of this rank, and return the losses that these compute.

        Raises:
            Exception: What this rank's code raised, or an ApplyError that names the rank whose code did; on every rank.
        """
        work.agree()
        num = len(work.micro_batches)
        try:
            self._post.compare_counts(num, self.device)  # a later stage would wait for ever else
            if not num:
                return []
            place = (self._placed.stages, self._schedule_of(num), self.pp_group.group_rank)
            return ScheduleExecutor(*place, work, arm=self.arm, tensor=self._tensor).run()
        except Exception as raised:
            if ends_exchanges(raised, self.pp_group.calls):
                raise
            error = refuse_functional_call(raised)
            self._tell_stages(num)
            work.tell_failure(error, is_alone=False)
            if error is not raised:
                raise error from raised
            raise

    @property
    def forward_groups(self) -> list[Communicator]:
        return [self.pp_group, *self.inner.forward_groups]

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        yield

    def try_forward(self, batch: Any) -> Any:
        args, kwargs = model_inputs(batch)
        self.prepare(lambda module: module(*args, **kwargs))
        with self._placed.undisturbed():
            return self.forward(args, kwargs)

    def idle_pass(self) -> None:
        self.begin_forward()
        self.end_forward()

    def _tell_stages(self, num_micro_batches: int) -> None:
        """Tell the other stages that this rank has failed: they may wait for it."""
        self._post.fail(num_micro_batches, self.device)
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
        self._placed.begin_step()
        self.inner.begin_step()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs, on every rank of the pipeline."""
        self.prepare(lambda module: module(*args, **kwargs))
        self.begin_forward()
        stages, collector = self._placed.stages, self._placed.collector
        try:
            with torch.no_grad():
                with collector.together(lambda: self._tell_stages(1)):
                    found = {
                        index: stage.forward(0, lambda m, stage=stage: stage.own_results(m(*args, **kwargs)))
                        for index, stage in sorted(stages.items())
                    }
                self._post.finish()
                outputs = collector.outputs(found, stages[min(found)].home_of, self._rank_of_stage)
        except Exception:
            # Other pipelines' forwards may not fail: all gather the next one's parameters, or none does.
            super().end_forward()
            raise
        self.end_forward()
        return outputs

    def finish_gradients(self, scale: float) -> None:
        self._post.finish()
        self._placed.end_forwards()
        sums_first = self.inner.gradients_leave is not GradientExit.NEVER
        steps = [self._placed.tied.sum, lambda: self.inner.finish_gradients(scale)]
        for run in steps if sums_first else reversed(steps):
            run()

    def gradient_squares(self, skipped: frozenset[int], *, exact: bool) -> Tensor:
        squares = self.inner.gradient_squares(skipped | self._placed.tied.counted_elsewhere, exact=exact)
        self.pp_group.all_reduce(squares)
        return squares

    def sync_buffers(self) -> None:
        self._placed.homes.agree()
        super().sync_buffers()

    def begin_inspection(self, number: int) -> str | None:
        """Start checking that stages receive what was sent, and one part of the inner engine."""
        self.inner.begin_inspection(number)
        # Equal on all ranks, whether or not there is a part to inspect on each.
        return self._placed.begin_inspection() if self._post.has_notes(self.device) else "parts of stages"

    def end_inspection(self) -> Sequence[Finding]:
        return [*self.inner.end_inspection(), *self._placed.end_inspection()]

    # -- whole values -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Give the module every parameter and buffer in full, on every rank, inside the context."""
        if self._inner is None:
            yield
            return
        placed = self._placed
        with placed.interception.suspended(), self._inner.whole_parameters(), self._copies_before.whole():
            spread_buffers(self.module, placed.stage_map, placed.collector, self._rank_of_stage, placed.stages)
            with placed.holding.whole(placed.collector.values(placed.holding.all)):
                yield

    def held_state(self) -> list[HeldPart]:
        if self._inner is None:
            return super().held_state()
        placed = self._placed
        elsewhere = {id(parameter) for parameter in placed.holding.absent.values()}
        elsewhere |= buffers_elsewhere(
            self.module, placed.stage_map, placed.collector, self._rank_of_stage, placed.stages
        )
        return [part for part in self._inner.held_state() if id(part.owner) not in elsewhere]

    def generators(self) -> dict[str, torch.Generator]:
        return {"draws between layers": self._placed.draws.generator} if self.is_prepared else {}

    def refresh_trainable(self) -> None:
        """Take note that `requires_grad` was switched: a rank hears of parameters that it does not hold from those that do."""
        rows = self.pp_group.all_gather_json(self.trainable_states(), device=self.device)
        told = {name: state for states in rows for name, state in states.items()}
        self._placed.holding.set_trainable(told)
        self._placed.shapes.forget(told)
        self.inner.refresh_trainable()

    def trainable_states(self) -> dict[str, bool]:
        holding = self._placed.holding
        return {name: p.requires_grad for name, p in holding.all.items() if name not in holding.absent}

    def held_parts(self, moment: RunMoment) -> list[tuple[Tensor, ShardFacts]]:
        return [*super().held_parts(moment), *(self._placed.holding.held_parts(moment) if self.is_prepared else ())]

    def gradient_terms(self) -> set[int]:
        tied = self._placed.tied.names if self.is_prepared else ()
        return super().gradient_terms() | {id(self._placed.holding.all[name]) for name in tied}

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self._placed.collector.gradients(self._placed.holding.all, self.inner.full_gradients())

    def begin_forward(self) -> None:
        self._post.begin()
        self._placed.begin_forward()
        self.inner.begin_forward()

    def end_forward(self) -> None:
        self._post.finish()
        self._placed.end_forwards()
        super().end_forward()

    def close(self) -> None:
        if self._inner is not None:
            self._placed.interception.close()
            self._inner.close()
            self._placed.holding.close()
