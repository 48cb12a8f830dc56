"""State of a pipeline whose calls are dealt out: this rank's stages, and what they share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.apply.finding import Finding
from meshwright.apply.pipeline.ownership.broadcasts import Collector
from meshwright.apply.pipeline.ownership.holding import Holding
from meshwright.apply.pipeline.ownership.tied import TiedGradients
from meshwright.apply.pipeline.ownership.whole_buffers import Homes
from meshwright.apply.pipeline.p2p import Post, boundary_name
from meshwright.apply.pipeline.stage import Stage
from meshwright.apply.pipeline.tracing.call_trace import Flow, modules_around
from meshwright.apply.pipeline.tracing.stage_map import StageMap, cut
from meshwright.apply.pipeline.walking.counters import Counters
from meshwright.apply.pipeline.walking.draws import Draws
from meshwright.apply.pipeline.walking.later_writes import LaterWrites
from meshwright.apply.pipeline.walking.layer_settings import LayerSettings
from meshwright.apply.pipeline.walking.own_state import OwnState
from meshwright.apply.pipeline.walking.shapes import Shapes, make_twins
from meshwright.apply.pipeline.walking.unit_hooks import Interception, UnderWay
from meshwright.comm.communicator import Communicator
from meshwright.schedule import PipelineSchedule
from meshwright.spec import Plan

__all__: list[str] = []

_LIVES = itertools.count()  # pipelines of this process so far; rank 0's number is that of all ranks


class Placed:
    """The stages of one rank, with the module reduced to what they hold. Every rank of the pipeline makes one together.

    Args:
        module: The user's module, whole.
        flow: Its calls.
        plan: Stages that the plan has fixed.
        schedule: Which stages are on which rank.
        post: The way to the other stages.
        group: The data-parallel ranks: those with the same stages.
        device: This rank's device.
        under_way: Where stages say which forward is under way.
        together: Sets of units whose calls lie on one stage, by tensor parallelism; None where there is none.
        make_group: (places on the pipe) -> the group of the ranks there; every rank calls it.
    """

    def __init__(
        self,
        module: nn.Module,
        flow: Flow,
        plan: Plan,
        schedule: PipelineSchedule,
        *,
        post: Post,
        group: Communicator,
        device: torch.device,
        under_way: UnderWay,
        together: Sequence[set[str]] | None,
        make_group: Callable[[Sequence[int]], Communicator],
    ) -> None:
        pipe, own = post.group, post.own
        self._module, self._units, self._under_way = module, flow.units, under_way
        ranks = [schedule.rank_of_stage(stage) for stage in range(plan.num_stages)]
        self.stage_map: StageMap = cut(module, flow, ranks, plan.stages, together or ())
        """Which stage runs what."""
        around = modules_around(module, flow.units)
        self._around = [child for _, child in around]
        self.homes = Homes(module, self._around, group, device)
        """Buffers of modules that are no part of a unit."""
        twins = {} if together is None else make_twins(module, flow.units)
        self.shapes = Shapes(twins, around, flow.draws_python, flow.own_tables)
        """Shapes of what other stages' calls give."""
        seed, life = pipe.all_gather_json([torch.initial_seed(), next(_LIVES)], device=device)[0]
        post.life = life * 37  # failures count on from here: not into the lives of the next pipeline
        self.draws = Draws(seed, device, apart=flow.draws, python=bool(flow.draws_python))
        """Random numbers that several stages draw."""
        self._own_state = OwnState(module, self._around, own) if len(own) > 1 else None
        self._settings = LayerSettings(module, flow.units)
        self._later_writes = LaterWrites(module, self.stage_map, in_parts=together is not None)
        self.stages = {
            index: Stage(
                index,
                module,
                self.stage_map,
                shapes=self.shapes,
                later_writes=self._later_writes,
                post=post,
                draws=self.draws,
                under_way=under_way,
                own_state=self._own_state,
                shards=1 if together is None else plan.tp,
            )
            for index in own
        }
        """This rank's stages, by number."""
        self.holding = Holding(module, self.stage_map.holders, own)
        """Parameters that this rank holds, and those that it does not."""
        holders = self.stage_map.holders.items()
        places = {name: sorted({ranks[stage] for stage in held}) for name, held in holders}
        self.collector = Collector(pipe, device, places)
        """Values and gradients of other stages, brought here."""
        self.tied = TiedGradients(places, self.holding.all, make_group, pipe.rank)
        """Parameters that several stages use."""
        self.interception: Interception

    def intercept(self) -> None:
        """Have calls of units come by the stages from now on; once the engine inside has taken what this rank holds."""
        self._later_writes.begin()
        self._settings.leave()
        for stage in self.stages.values():
            stage.counters = Counters(self._around)
        self.interception = Interception(self._module, self._units, self._around, self._under_way)

    def begin_step(self) -> None:
        """Forget what a step that ended in an error has left behind, and draw anew."""
        for stage in self.stages.values():
            stage.forget()
        self.draws.begin_step()
        self.shapes.follow(self._settings)
        if self._own_state is not None:
            self._own_state.begin_step()

    def begin_forward(self) -> None:
        """Begin forwards that no step surrounds."""
        self.draws.begin_forward()
        self.shapes.follow(self._settings)
        if self._own_state is not None:
            self._own_state.begin_step()

    def end_forwards(self) -> None:
        """Take note that the forwards of a step, or those without one, are over."""
        self._settings.leave()
        if self._own_state is not None:
            self._own_state.end_step()

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Run forwards on trial inside the context: the stages' own state does not move, even where one raises."""
        return contextlib.nullcontext() if self._own_state is None else self._own_state.undisturbed()

    def begin_inspection(self) -> str:
        """Start comparing digests of what stages receive with those of what was sent; return the first boundary's name."""
        for stage in self.stages.values():
            stage.is_inspected = True
        return boundary_name(1)

    def end_inspection(self) -> list[Finding]:
        """Return what was found."""
        found: list[Finding] = []
        for stage in self.stages.values():
            found += stage.findings
            stage.findings, stage.is_inspected = [], False
        return found
