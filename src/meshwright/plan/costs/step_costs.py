"""Cost of a step: seconds and bytes of a setup of a model on a cluster, broken down."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Final

from meshwright.hardware import ClusterSpec
from meshwright.hardware.cluster import HOST_DEVICE
from meshwright.hardware.efficiency import Efficiency, efficiency_of
from meshwright.plan.costs.data_parallel_cost import exchange
from meshwright.plan.costs.layer_times import LayerTimes, layer_times
from meshwright.plan.costs.layers_cost import LayersCost, kinds_of
from meshwright.plan.costs.machine import Machine, require_numbers
from meshwright.plan.costs.rank_memory import (
    RankLoad,
    RankMemory,
    fullest,
    in_flight_on_ranks,
    micro_batches_in_flight,
    not_exceeded,
    rank_memory,
    together,
)
from meshwright.plan.costs.runtime_cost import sharding_s, walks_s
from meshwright.plan.costs.setup import (
    SEEN_BY_LAYERS,
    SEEN_BY_PIPELINE,
    Setup,
    StateBytes,
    seen_by_layers,
    seen_by_pipeline,
)
from meshwright.plan.costs.stage_bytes import chain_bytes, partial_bytes, pipeline_bytes, repeated_bytes
from meshwright.plan.costs.stages import (
    balanced_cut,
    even_cut,
    least_pipeline_s,
    own_cut,
    params_at_first_use,
    pipeline_s,
    share_cut,
    waits_s,
    weight_fraction,
)
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks
from meshwright.plan.costs.step_cost import PassesCost, StepCost
from meshwright.spec.model import ModelSpec
from meshwright.spec.prediction import MemoryBreakdown, Prediction, TimeBreakdown

__all__: list[str] = []

_BUCKET_BYTES: Final = 40 * 2**20
"""Gradients that are reduced together [bytes]."""

_HOST_LINK_BYTES_PER_S: Final = 20e9
"""What a device copies to and from its host: two thirds of PCIe 4.0 x16. An estimate [bytes/s]."""

_HOST_MEMORY_BYTES_PER_S: Final = 25e9
"""A device's share of its host's memory bandwidth: 200 GB/s over 8 devices. An estimate [bytes/s]."""

_TENSORS: Final = 2
"""Parameter tensors of an operator that has parameters: a weight and a bias [count]."""

_RUN_AGAIN: Final = ("full", "all_but_products", "every_other_product")
"""Kinds of recompute that run a whole layer again, and keep all of it meanwhile."""

_MOST_STAGES: Final = 16
"""Stages for which the runtime's own cut is worked out: it takes long for more [count]."""

_ROUNDED: Final = 1e-9
"""By how much sums of times may differ by the order in which they are added, at most [ratio]."""


class StepCosts:
    """Costs of any setup of one model on one cluster; what setups have in common is computed once.

    Args:
        model: The model.
        cluster: The cluster.
        efficiency: Shares of its peaks; None means those that the cluster has, or else those of its device in the table.

    Raises:
        ConfigError: The cluster lacks a number that costs need.
    """

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, efficiency: Efficiency | None = None) -> None:
        require_numbers(cluster)
        self.model = model
        self.cluster = cluster
        self._model_bytes = model.params_bytes / model.num_params if model.num_params else 4.0
        self._kinds, self._kind = kinds_of(model)
        self._inner_kinds = set(self._kind[:-1])
        place = {layer.name: index for index, layer in enumerate(model.layers)}
        weights = sum(1 for layer in model.layers for operator in layer.operators if operator.num_params)
        self._num_tensors = _TENSORS * max(weights, len(model.layers))
        self._shared = [([place[name] for name in one.layers], one.num_params) for one in model.shared]
        self._num_between = sum(layer.host.between for layer in model.layers if layer.host is not None)
        self._fresh = params_at_first_use(model)
        self._whole_shares: dict[float, float] = {}
        self._own_cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.use(efficiency or cluster.efficiency or efficiency_of(cluster.device.name))

    def use(self, efficiency: Efficiency) -> None:
        """Cost with other shares from now on."""
        self.machine = Machine(self.cluster, efficiency)
        self._is_far = bool(efficiency.far_traffic or efficiency.far_product)
        self._times = functools.lru_cache(maxsize=4096)(self._times_of)
        self._layers = functools.lru_cache(maxsize=4096)(self._layers_of)
        self._passes = functools.lru_cache(maxsize=4096)(self._passes_of)
        self._cuts = functools.lru_cache(maxsize=4096)(self._cut_of)
        self._placed = functools.lru_cache(maxsize=1024)(functools.partial(StagesOnRanks, kinds=self._kind))
        self._sums_of = functools.lru_cache(maxsize=1024)(self._added_up)  # pipelines differ in few of them

    def _times_of(self, *seen: object) -> tuple[LayerTimes, ...]:
        setup = Setup(**dict(zip(SEEN_BY_LAYERS, seen, strict=True)))  # type: ignore[arg-type]
        return tuple(
            layer_times(kind, setup, self.machine, model_bytes=self._model_bytes, is_last=place == self._kind[-1])
            for place, kind in enumerate(self._kinds)
        )

    def _layers_of(
        self, seen: tuple[object, ...], recompute: str, kept_bytes: float, accumulated_s: float
    ) -> LayersCost:
        """Return what the layers take, with so many bytes kept between forward and backward, and so long for a gradient added."""
        kinds = self._times(*seen)
        known = dict(zip(SEEN_BY_LAYERS, seen, strict=True))
        waits, keeps_head = bool(known["waits_for_device"]), known["keeps_head"]
        passes = [times.passes_s(self.machine, recompute, kept_bytes, waits) for times in kinds]
        if keeps_head:
            passes[self._kind[-1]] = (*passes[self._kind[-1]][:2], 0.0)
        if recompute != "none":
            each = self.machine.efficiency.runtime_s("recompute", len(self._kind)) / len(self._kind)
            passes = [(forward, backward, again + each) for forward, backward, again in passes]
        of_kinds = tuple(sum(one) + times.num_params * accumulated_s for one, times in zip(passes, kinds, strict=True))
        return LayersCost(
            kinds,
            *(self._sums(part) for part in zip(*passes, strict=True)),
            totals_s=self._sums(of_kinds),
            of_kinds_s=of_kinds,
            num_params=self._sums([times.num_params for times in kinds]),
            kept_bytes=self._sums([times.kept_bytes(recompute) for times in kinds]),
            issued_s=self._sums([times.host_s(self.machine)[0] for times in kinds]),
        )

    def _accumulated_s(self, setup: Setup) -> float:
        """Return what it takes to add an element of a gradient to those of the micro-batches before [s]."""
        adds = setup.trains_weights and setup.micro_batches > 1
        return setup.accumulated_bytes / self.machine.memory_bytes_per_s if adds else 0.0

    def cost(self, setup: Setup) -> StepCost:
        """Return the cost of one step."""
        return self.cost_with(self.passes(setup), setup)

    def passes(self, setup: Setup) -> PassesCost:
        """Return what a step costs before data parallelism."""
        return self._passes(*seen_by_pipeline(setup))

    def cost_with(self, passes: PassesCost, setup: Setup) -> StepCost:
        """Return the cost of one step whose passes are known; of the setup what data parallelism sees counts."""
        shared = exchange(
            setup,
            self.machine,
            num_params=passes.num_params,
            forward_s=passes.forward_s,
            backward_s=passes.backward_s + passes.recompute_s,
            depth=len(self._kind) / setup.pp,
            whole_share=self._whole_share(setup) if setup.zero >= 3 else 0.0,
        )
        sent_tp, sent_pp = self._sent_bytes(passes, setup.states)
        sent = {"dp": shared.sent_bytes, "tp": sent_tp, "pp": sent_pp}
        return StepCost(
            forward_s=passes.forward_s,
            backward_s=passes.backward_s,
            recompute_s=passes.recompute_s,
            bubble_s=passes.bubble_s,
            exposed_comm_s=shared.exposed_s
            + sharding_s(self.machine.efficiency, self._num_tensors, setup)
            + passes.waits_s,
            optimizer_s=self._optimizer_s(passes.num_params, setup),
            memory=self.memory_with(passes, setup),
            # Of one process the ledger counts what all its devices send.
            sent_bytes={
                axis: amount * (setup.num_devices if setup.one_process else 1) for axis, amount in sent.items()
            },
        )

    def least_s(self, passes: PassesCost, setup: Setup) -> float:
        """Return a time that a step of these passes does not go below, to the bit: what it takes if all exchanges hide [s]."""
        # In the order of `StepCost.step_s`: a sum of floats does not fall where one of them grows.
        busy = passes.forward_s + passes.backward_s + passes.recompute_s
        exposed = sharding_s(self.machine.efficiency, self._num_tensors, setup) + passes.waits_s
        return busy + passes.bubble_s + exposed + self._optimizer_s(passes.num_params, setup)

    def least_order_s(self, setup: Setup, schedule: str, virtual: int, recompute: str) -> float:
        """Return a time that no step of these degrees in such an order goes below, however its stages are cut [s].

        Args:
            setup: The degrees.
            schedule: Its name.
            virtual: Stages of a rank [count].
            recompute: What runs again.
        """
        if self._is_far:  # what a pass takes depends on what all micro-batches keep
            return 0.0
        layers = self._layers(seen_by_layers(setup), recompute, 0.0, self._accumulated_s(setup))
        send_s = self._send_s(layers.kinds, setup)
        least = least_pipeline_s(
            layers.totals_s[-1] + setup.pp * waits_s(setup, virtual, send_s),
            ranks=setup.pp,
            micro_batches=setup.micro_batches,
            virtual=virtual,
            schedule=schedule,
            weight_fraction=weight_fraction(setup),
            send_s=send_s,
        )
        return (least + self.machine.efficiency.step_s) * (1 - _ROUNDED)

    def _whole_share(self, setup: Setup) -> float:
        """Return the share of the parameters that lie in layers which ZeRO-3 leaves whole [ratio]."""
        below = setup.whole_below / setup.states.parameter * setup.tp
        if below not in self._whole_shares:
            small = sum(size for size in self._fresh if size < below)
            self._whole_shares[below] = small / max(1, sum(self._fresh))
        return self._whole_shares[below]

    def memory_with(self, passes: PassesCost, setup: Setup) -> RankMemory:
        """Return the memory of one rank at the peak of a step whose passes are known."""
        shares_memory = setup.one_process and self.cluster.device.name == HOST_DEVICE
        if shares_memory:
            memories = [rank_memory(load, setup, bucket_bytes=_BUCKET_BYTES) for load in passes.loads]
            memory = together(memories, setup.dp)
        else:
            memory = fullest(passes.loads, setup, bucket_bytes=_BUCKET_BYTES)
        efficiency = self.machine.efficiency
        gaps = (efficiency.held - 1) * memory.activations
        memory.buffers += efficiency.process_bytes + gaps
        kept = self.model.buffers_bytes * (setup.dp if shares_memory else 1)
        # Before the first step they are copied twice, for the other ranks and for a trial of the loss.
        memory.buffers += kept + max(0.0, 2 * kept - memory.gradients - memory.optimizer - memory.activations)
        return memory

    def _bounds(self, of_kinds: tuple[float, ...], num_stages: int, setup: Setup) -> tuple[int, ...]:
        if setup.cut_by_work and 1 < num_stages <= _MOST_STAGES:
            seen = (setup.micro_batch_size, setup.tp > 1, setup.pp, setup.virtual, setup.schedule)
            if seen not in self._own_cuts:
                self._own_cuts[seen] = own_cut(self.model, setup)
            return self._own_cuts[seen]
        if setup.cut_by_shares:
            return share_cut(self._sums(of_kinds), num_stages)
        even = even_cut(len(self._kind), num_stages) if setup.cut_evenly and num_stages > 1 else None
        return even or self._cuts(of_kinds, num_stages)

    def _cut_of(self, of_kinds: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
        return balanced_cut(self._sums(of_kinds), num_stages)

    def _passes_of(self, *piped: object) -> PassesCost:
        setup = Setup(**dict(zip(SEEN_BY_PIPELINE, piped, strict=True)))  # type: ignore[arg-type]
        seen, accumulated = seen_by_layers(setup), self._accumulated_s(setup)
        kept = 0.0
        if self._is_far:
            of_layers = self._sums([times.kept_bytes(setup.recompute) for times in self._times(*seen)])[-1]
            kept = micro_batches_in_flight(0, setup) / (1 if setup.schedule == "sequential" else setup.pp) * of_layers
        layers = self._layers(seen, setup.recompute, kept, accumulated)
        num_stages = min(setup.num_stages, len(self._kind))
        placed = self._placed(self._bounds(layers.of_kinds_s, num_stages, setup), setup.pp, setup.schedule)
        walks = walks_s(self.machine.efficiency, placed, layers.issued_s, self._num_between, setup)
        busy = [one + walk for one, walk in zip(placed.on_ranks(layers.totals_s), walks, strict=True)]
        params = placed.on_ranks(layers.num_params)
        for rank, repeated in enumerate(placed.repeated(self._shared)):
            params[rank] -= repeated / setup.tp
        slowest = max(range(setup.pp), key=busy.__getitem__)
        send_s = self._send_s(layers.kinds, setup)
        waits = waits_s(setup, setup.virtual, send_s)
        total, bubble = pipeline_s(
            [one + waits for one in busy],
            micro_batches=setup.micro_batches,
            virtual=setup.virtual,
            schedule=setup.schedule,
            weight_fraction=weight_fraction(setup),
            send_s=send_s,
        )
        forward, backward, again = (
            placed.on_rank(slowest, part) * setup.micro_batches
            for part in (layers.forward_s, layers.backward_s, layers.recompute_s)
        )
        forward += walks[slowest] * setup.micro_batches
        backward += params[slowest] * accumulated * setup.micro_batches
        return PassesCost(
            forward_s=forward,
            backward_s=backward,
            recompute_s=again,
            bubble_s=bubble,
            waits_s=max(0.0, total - bubble - forward - backward - again),
            num_params=sum(params) if setup.schedule == "sequential" else max(params),
            loads=self._loads(layers, params, placed, setup),
            kinds=layers.kinds,
            placed=placed,
            setup=setup,
        )

    def _sent_bytes(self, passes: PassesCost, states: StateBytes) -> tuple[float, float]:
        """Return what a rank sends over tp and over pp in the mean [bytes]."""
        kinds, placed, setup = passes.kinds, passes.placed, passes.setup.with_fields(states=states)
        layers = [kinds[kind] for kind in self._kind]
        sent = sum(placed.on_ranks(self._sums([times.sent_bytes for times in kinds]))) / setup.pp
        sent += chain_bytes(layers, placed, setup) / setup.pp
        partial = self._sums([times.partial_params for times in kinds])[-1]
        over_tp = sent * setup.micro_batches + partial_bytes(partial, setup) / setup.pp
        return over_tp, pipeline_bytes(layers, placed, setup, self._shared)

    def seconds(self, setup: Setup) -> float:
        """Return the time of one step [s]."""
        return self.cost(setup).step_s

    def predict(self, setup: Setup) -> Prediction:
        """Return the cost of one step as a value."""
        cost = self.cost(setup)
        memory = cost.memory
        return Prediction(
            time=TimeBreakdown(
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                recompute_s=cost.recompute_s,
                bubble_s=cost.bubble_s,
                exposed_comm_s=cost.exposed_comm_s,
                optimizer_s=cost.optimizer_s,
            ),
            memory=MemoryBreakdown(
                parameters_bytes=round(memory.parameters),
                gradients_bytes=round(memory.gradients),
                optimizer_bytes=round(memory.optimizer),
                activations_bytes=round(memory.activations),
                buffers_bytes=round(memory.buffers),
            ),
            sent_bytes={axis: round(sent) for axis, sent in cost.sent_bytes.items()},
            mfu=self._mfu(cost.step_s, setup),
        )

    def _sums(self, of_kinds: Sequence[float]) -> tuple[float, ...]:
        """Return the sums of the layers' values up to each layer, from those of the kinds."""
        return self._sums_of(tuple(of_kinds))

    def _added_up(self, of_kinds: tuple[float, ...]) -> tuple[float, ...]:
        return (0.0, *itertools.accumulate(map(of_kinds.__getitem__, self._kind)))

    def _send_s(self, kinds: Sequence[LayerTimes], setup: Setup) -> float:
        if setup.pp == 1:
            return 0.0
        width = self._width(kinds)
        if setup.sequence_parallel and not setup.sends_slices:
            width *= setup.tp
        if setup.sends_slices and not setup.sequence_parallel:
            width /= setup.tp
        return self.machine.message_s(width, inside=setup.num_devices <= self.machine.cluster.devices_per_host)

    def _width(self, kinds: Sequence[LayerTimes]) -> float:
        """Return the largest result that a stage may hand on [bytes]."""
        return max((kinds[kind].input_bytes for kind in self._inner_kinds), default=0.0)

    def _optimizer_s(self, num_params: float, setup: Setup) -> float:
        efficiency = self.machine.efficiency
        own = num_params / (setup.shard if setup.zero else 1) * (1.0 if setup.trains_weights else 0.01)
        if setup.offloads_optimizer:
            moved = own * (setup.sent_gradient_bytes + setup.gathered_bytes) / _HOST_LINK_BYTES_PER_S
            return moved + own * efficiency.optimizer_bytes / _HOST_MEMORY_BYTES_PER_S + efficiency.step_s
        parts = 1 if setup.schedule == "sequential" else setup.pp
        tensors = self._num_tensors / parts * efficiency.tensor_s
        tensors += efficiency.runtime_s("step", len(self._kind) / parts)
        tensors += efficiency.runtime_s("tensor", 0) if setup.tp > 1 else 0.0
        return own * efficiency.optimizer_bytes / self.machine.memory_bytes_per_s + tensors + efficiency.step_s

    def _mfu(self, step_s: float, setup: Setup) -> float | None:
        if not self.machine.cluster.device.peak_flops_per_s or step_s <= 0:
            return None
        samples = setup.global_batch_size or setup.micro_batch_size * setup.micro_batches * setup.dp
        peak = self.machine.peak(setup.dtype) * setup.num_devices
        return min(1.0, 3.0 * self.model.forward_flops * samples / (step_s * peak))

    def _loads(
        self, layers: LayersCost, params: Sequence[float], placed: StagesOnRanks, setup: Setup
    ) -> list[RankLoad]:
        """Return what the ranks hold, without those that another one exceeds in everything."""
        kinds, kept = layers.kinds, placed.on_ranks(layers.kept_bytes)
        largest = placed.most([times.num_params for times in kinds])
        again = [0.0] * setup.pp
        if setup.recompute in _RUN_AGAIN:
            again = placed.most([repeated_bytes(times, setup) for times in kinds])
        outputs = kinds[self._kind[-1]].loss_bytes
        if setup.blocks_on_messages and setup.pp > 1:
            kept = [one + self._width(kinds) for one in kept]
        in_flight = map(operator.mul, kept, in_flight_on_ranks(setup))
        last = [outputs if rank == placed.ranks[-1] else 0.0 for rank in range(setup.pp)]
        sizes = list(zip(params, in_flight, largest, last, again, strict=True))
        if setup.schedule != "sequential":  # where one process has them all
            sizes = not_exceeded(sizes)
        return [RankLoad(*one) for one in sizes]
