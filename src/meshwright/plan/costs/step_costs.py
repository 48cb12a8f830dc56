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
from meshwright.plan.costs.setup import Setup, StateBytes
from meshwright.plan.costs.stage_bytes import chain_bytes, partial_bytes, pipeline_bytes
from meshwright.plan.costs.stages import balanced_cut, even_cut, own_cut, params_at_first_use, pipeline_s
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks
from meshwright.plan.costs.step_cost import PassesCost, StepCost
from meshwright.spec.layer import LayerSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.prediction import MemoryBreakdown, Prediction, TimeBreakdown

__all__: list[str] = []

_BUCKET_BYTES: Final = 40 * 2**20
"""Gradients that are reduced together [bytes]."""

_WEIGHT_FRACTION: Final = 1 / 3
"""Share of forward and backward that gradients of weights take: one of three products [ratio]."""

_HOST_LINK_BYTES_PER_S: Final = 20e9
"""What a device copies to and from its host: two thirds of PCIe 4.0 x16. An estimate [bytes/s]."""

_HOST_MEMORY_BYTES_PER_S: Final = 25e9
"""A device's share of its host's memory bandwidth: 200 GB/s over 8 devices. An estimate [bytes/s]."""

_TENSORS: Final = 2
"""Parameter tensors of an operator that has parameters: a weight and a bias [count]."""

_IN_HALVES: Final = ("zb-h1", "zb-h2", "zbv")
"""Schedules that put gradients of weights off."""

_RUN_AGAIN: Final = ("full", "all_but_products", "every_other_product")
"""Kinds of recompute that run a whole layer again, and keep all of it meanwhile."""

_MOST_STAGES: Final = 16
"""Stages for which the runtime's own cut is worked out: it takes long for more [count]."""

_ASYNCHRONOUS: Final = 0.3
"""Share of a message between stages that is not hidden where messages are posted ahead. An estimate [ratio]."""


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
        self._kinds, self._kind = _kinds_of(model)
        self._inner_kinds = set(self._kind[:-1])
        place = {layer.name: index for index, layer in enumerate(model.layers)}
        weights = sum(1 for layer in model.layers for operator in layer.operators if operator.num_params)
        self._num_tensors = _TENSORS * max(weights, len(model.layers))
        self._shared = [([place[name] for name in one.layers], one.num_params) for one in model.shared]
        self._fresh = params_at_first_use(model)
        self._whole_shares: dict[float, float] = {}
        self._own_cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.use(efficiency or cluster.efficiency or efficiency_of(cluster.device.name))

    def use(self, efficiency: Efficiency) -> None:
        """Cost with other shares from now on."""
        self.machine = Machine(self.cluster, efficiency)
        self._times = functools.lru_cache(maxsize=4096)(self._times_of)
        self._passes = functools.lru_cache(maxsize=4096)(self._passes_of)
        self._cuts = functools.lru_cache(maxsize=4096)(self._cut_of)
        self._placed = functools.lru_cache(maxsize=1024)(functools.partial(StagesOnRanks, kinds=self._kind))
        self._sums_of = functools.lru_cache(maxsize=1024)(self._added_up)  # pipelines differ in few of them

    def _times_of(self, *seen: object) -> tuple[LayerTimes, ...]:
        setup = Setup(**dict(zip(_SEEN, seen, strict=True)))  # type: ignore[arg-type]
        last = self._kind[-1]
        return tuple(
            layer_times(kind, setup, self.machine, model_bytes=self._model_bytes, is_last=place == last)
            for place, kind in enumerate(self._kinds)
        )

    def cost(self, setup: Setup) -> StepCost:
        """Return the cost of one step."""
        return self.cost_with(self.passes(setup), setup)

    def passes(self, setup: Setup) -> PassesCost:
        """Return what a step costs before data parallelism."""
        return self._passes(*_piped(setup))

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
            exposed_comm_s=shared.exposed_s + self._sharding_s(setup) + passes.waits_s,
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
        exposed = self._sharding_s(setup) + passes.waits_s
        return busy + passes.bubble_s + exposed + self._optimizer_s(passes.num_params, setup)

    def _whole_share(self, setup: Setup) -> float:
        """Return the share of the parameters that lie in layers which ZeRO-3 leaves whole [ratio]."""
        below = setup.whole_below / setup.states.parameter * setup.tp
        if below not in self._whole_shares:
            small = sum(size for size in self._fresh if size < below)
            self._whole_shares[below] = small / max(1, sum(self._fresh))
        return self._whole_shares[below]

    def memory_with(self, passes: PassesCost, setup: Setup) -> RankMemory:
        """Return the memory of one rank at the peak of a step whose passes are known."""
        memories = [rank_memory(load, setup, bucket_bytes=_BUCKET_BYTES) for load in passes.loads]
        shares_memory = setup.one_process and self.cluster.device.name == HOST_DEVICE
        memory = together(memories, setup.dp) if shares_memory else fullest(memories)
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
        even = even_cut(len(self._kind), num_stages) if setup.cut_evenly and num_stages > 1 else None
        return even or self._cuts(of_kinds, num_stages)

    def _cut_of(self, of_kinds: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
        return balanced_cut(self._sums(of_kinds), num_stages)

    def _passes_of(self, *piped: object) -> PassesCost:
        setup = Setup(**dict(zip(_PIPED, piped, strict=True)))  # type: ignore[arg-type]
        kinds = self._times(*_seen(setup))
        in_flight = micro_batches_in_flight(0, setup) / (1 if setup.schedule == "sequential" else setup.pp)
        kept = in_flight * self._sums([times.kept_bytes(setup.recompute) for times in kinds])[-1]
        passes = [times.passes_s(self.machine, setup.recompute, kept) for times in kinds]
        if setup.recompute != "none":
            each = self.machine.efficiency.runtime_s("recompute", len(self._kind)) / len(self._kind)
            passes = [(forward, backward, again + each) for forward, backward, again in passes]
        accumulated = 0.0
        if setup.trains_weights and setup.micro_batches > 1:
            accumulated = setup.accumulated_bytes / self.machine.memory_bytes_per_s
        of_kinds = tuple(sum(one) + times.num_params * accumulated for one, times in zip(passes, kinds, strict=True))
        totals = self._sums(of_kinds)
        num_stages = min(setup.num_stages, len(self._kind))
        placed = self._placed(self._bounds(of_kinds, num_stages, setup), setup.pp, setup.schedule)
        walks = self._walks_s(placed, setup)
        busy = [one + walk for one, walk in zip(placed.on_ranks(totals), walks, strict=True)]
        params = placed.on_ranks(self._sums([times.num_params for times in kinds]))
        for rank, repeated in enumerate(placed.repeated(self._shared)):
            params[rank] -= repeated / setup.tp
        slowest = max(range(setup.pp), key=busy.__getitem__)
        send_s = self._send_s(kinds, setup)
        messages = 4 if setup.blocks_on_messages else 2  # one to and one from either neighbour, or these in pairs
        waits = messages * setup.virtual * send_s * (_ASYNCHRONOUS if setup.overlap else 1.0)
        total, bubble = pipeline_s(
            [one + waits for one in busy],
            micro_batches=setup.micro_batches,
            virtual=setup.virtual,
            schedule=setup.schedule,
            weight_fraction=_WEIGHT_FRACTION if setup.trains_weights else 0.0,
            send_s=send_s,
        )
        forward, backward, again = (
            placed.on_ranks(self._sums(part))[slowest] * setup.micro_batches for part in zip(*passes, strict=True)
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
            loads=self._loads(kinds, params, placed, setup),
            kinds=kinds,
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

    def _walks_s(self, placed: StagesOnRanks, setup: Setup) -> list[float]:
        """Return what each rank's stages take beside their layers for a micro-batch: every one follows the whole forward [s]."""
        if setup.pp == 1 or setup.one_process or not self.machine.efficiency.runtime:
            return [0.0] * setup.pp
        efficiency, layers = self.machine.efficiency, len(self._kind)
        walks = [0.0] * setup.pp
        for rank, (first, last) in zip(placed.ranks, itertools.pairwise(placed.bounds), strict=True):
            walks[rank] += efficiency.runtime_s("stage", layers)
            walks[rank] += efficiency.runtime_s("half", last - first) if setup.schedule in _IN_HALVES else 0.0
        return walks

    def _sharding_s(self, setup: Setup) -> float:
        """Return what a rank does beside exchanging, where ZeRO exchanges parameter by parameter [s]."""
        if setup.zero < 2 or setup.per_step or setup.dp == 1:
            return 0.0
        return setup.micro_batches * self.machine.efficiency.runtime_s("zero", self._num_tensors / setup.pp)

    def _optimizer_s(self, num_params: float, setup: Setup) -> float:
        efficiency = self.machine.efficiency
        own = num_params / (setup.shard if setup.zero else 1) * (1.0 if setup.trains_weights else 0.01)
        if setup.offloads_optimizer:
            moved = own * (setup.sent_gradient_bytes + setup.gathered_bytes) / _HOST_LINK_BYTES_PER_S
            return moved + own * efficiency.optimizer_bytes / _HOST_MEMORY_BYTES_PER_S + efficiency.step_s
        parts = 1 if setup.schedule == "sequential" else setup.pp
        tensors = self._num_tensors / parts * efficiency.tensor_s
        tensors += efficiency.runtime_s("step", len(self._kind) / parts)
        return own * efficiency.optimizer_bytes / self.machine.memory_bytes_per_s + tensors + efficiency.step_s

    def _mfu(self, step_s: float, setup: Setup) -> float | None:
        if not self.machine.cluster.device.peak_flops_per_s or step_s <= 0:
            return None
        samples = setup.global_batch_size or setup.micro_batch_size * setup.micro_batches * setup.dp
        peak = self.machine.peak(setup.dtype) * setup.num_devices
        return min(1.0, 3.0 * self.model.forward_flops * samples / (step_s * peak))

    def _loads(
        self, kinds: Sequence[LayerTimes], params: Sequence[float], placed: StagesOnRanks, setup: Setup
    ) -> list[RankLoad]:
        """Return what the ranks hold, without those that another one exceeds in everything."""
        kept = placed.on_ranks(self._sums([times.kept_bytes(setup.recompute) for times in kinds]))
        largest = placed.most([times.num_params for times in kinds])
        again = [0.0] * setup.pp
        if setup.recompute in _RUN_AGAIN:
            again = placed.most([times.saved_bytes + times.cast_bytes for times in kinds])
        outputs = kinds[self._kind[-1]].loss_bytes
        if setup.blocks_on_messages and setup.pp > 1:
            kept = [one + self._width(kinds) for one in kept]
        in_flight = map(operator.mul, kept, in_flight_on_ranks(setup))
        last = [outputs if rank == placed.ranks[-1] else 0.0 for rank in range(setup.pp)]
        sizes = list(zip(params, in_flight, largest, last, again, strict=True))
        if setup.schedule != "sequential":  # where one process has them all
            sizes = not_exceeded(sizes)
        return [RankLoad(*one) for one in sizes]


_SEEN: Final = (
    "tp", "cp", "micro_batch_size", "sequence_parallel", "dtype", "element_bytes", "own_dtypes", "overlaps_tp", "is_eager",
    "trains_weights", "native_attention", "attention_speed",
)  # fmt: skip
"""What a layer sees of a setup: setups that differ in nothing else share its cost."""

_PIPED: Final = (
    *_SEEN, "dp", "pp", "virtual", "schedule", "micro_batches", "recompute", "overlap", "accumulated_bytes", "sends_slices",
    "cut_by_work", "cut_evenly", "blocks_on_messages", "one_process",
)  # fmt: skip
"""What a pipeline sees of a setup."""

_seen: Final = operator.attrgetter(*_SEEN)
_piped: Final = operator.attrgetter(*_PIPED)


def _kinds_of(model: ModelSpec) -> tuple[list[LayerSpec], list[int]]:
    """Return one layer of each kind, and the kind of each layer: equal layers are costed once; their names differ."""
    known: dict[tuple[object, ...], int] = {}
    kinds: list[LayerSpec] = []
    of_layers: list[int] = []
    for layer in model.layers:
        sums = (
            layer.num_params,
            layer.forward_flops,
            layer.output_bytes,
            layer.output_elements,
            layer.activation_bytes,
        )
        kind = known.setdefault((*sums, layer.operators), len(kinds))
        if kind == len(kinds):
            kinds.append(layer)
        of_layers.append(kind)
    return kinds, of_layers
