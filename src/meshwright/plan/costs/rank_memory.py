"""Bytes of one rank at the peak of a step: states of its parameters, activations in flight, buffers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence

from meshwright.plan.costs.setup import Setup

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, slots=True)
class RankLoad:
    """What one pp rank holds, before ZeRO."""

    num_params: float
    """Elements of its parameters [count]."""
    activation_bytes: float
    """What its stages keep for all micro-batches in flight [bytes]."""
    largest_params: float
    """Elements of its largest layer, which ZeRO-3 gathers [count]."""
    output_bytes: float
    """The largest result that is alive beside what is kept, such as the logits in fp32 [bytes]."""
    recomputed_bytes: float
    """What one layer keeps while it is run again [bytes]."""


@dataclasses.dataclass(slots=True)
class RankMemory:
    """Bytes of one rank at the peak; `MemoryBreakdown` documents them."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        """The sum [bytes]."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def state_bytes(num_params: float, setup: Setup) -> tuple[float, float, float]:
    """Return bytes of parameters, gradients and optimizer on one rank.

    Source:
        Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3 and figure 1: stage 1 shards the optimizer, 2 also the
        gradients, 3 also the parameters. Where it exchanges once a step, gradients and gathered parameters are whole meanwhile.
    """
    states, shard = setup.states, setup.shard
    trained = num_params if setup.trains_weights else 0.0
    parameters, gradients = num_params * states.parameter, trained * states.gradient
    if setup.zero >= 2:
        kept = _kept(setup)
        parameters, gradients = parameters * (kept if setup.zero >= 3 else 1.0), gradients * kept
    optimizer = trained * states.optimizer / (shard if setup.zero >= 1 else 1)
    return parameters, gradients, 0.0 if setup.offloads_optimizer else optimizer


def _kept(setup: Setup) -> float:
    """Return the share of what ZeRO shards that a rank has at the peak: beside its shard, all, where per step."""
    return 1 / setup.shard + (1.0 if setup.per_step and setup.shard > 1 else 0.0)


def micro_batches_in_flight(rank: int, setup: Setup) -> float:
    """Return for how many micro-batches a pp rank keeps all of its stages at the peak [count].

    Source:
        Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3 (1F1B: p - rank; interleaved: 1 + (p - 1) / (p v) of p for the
        first rank); Qi et al. 2023, arXiv:2401.10241, table 1 (ZB-H1 as 1F1B, ZB-H2 up to 2 p - 1, ZB-V p for all).
    """
    ranks, micro_batches = setup.pp, setup.micro_batches
    if ranks == 1 or setup.schedule == "sequential":
        return 1.0
    if setup.schedule == "gpipe":
        return micro_batches
    if setup.schedule == "interleaved":
        chunks = 2 * (ranks - rank - 1) + (setup.virtual - 1) * ranks + 1
        return min(chunks / setup.virtual, micro_batches)
    if setup.schedule == "zb-h1":
        return min(ranks, micro_batches)
    if setup.schedule == "zb-h2":
        return min(2 * ranks - 1, micro_batches)
    if setup.schedule == "zbv":
        return min(ranks, micro_batches)
    return min(ranks - rank, micro_batches)


def in_flight_on_ranks(setup: Setup) -> list[float]:
    """Return `micro_batches_in_flight` of each pp rank [count]."""
    if setup.schedule in ("1f1b", "interleaved"):
        return [micro_batches_in_flight(rank, setup) for rank in range(setup.pp)]
    return [micro_batches_in_flight(0, setup)] * setup.pp  # which is the same on all of them


def rank_memory(load: RankLoad, setup: Setup, *, bucket_bytes: float) -> RankMemory:
    """Return the memory of one rank at its peak."""
    return fullest((load,), setup, bucket_bytes=bucket_bytes)


def fullest(loads: Sequence[RankLoad], setup: Setup, *, bucket_bytes: float) -> RankMemory:
    """Return the memory of the fullest of some ranks at its peak; a search asks for it tens of thousands of times."""
    of_parameter, of_gradient, of_state = state_bytes(1.0, setup)
    gathers = setup.zero >= 3 and not setup.per_step
    # The layer that runs and the one that is gathered ahead, and the gradients of one before they are scattered.
    gathered = 2 * setup.gathered_bytes + setup.states.gradient
    sums = bool(setup.zero) and setup.dp > 1
    found, most = None, -1.0
    for load in loads:
        num_params = load.num_params
        buffers = load.output_bytes + load.recomputed_bytes
        if gathers:
            buffers += load.largest_params * gathered
        elif sums:
            buffers += min(bucket_bytes, num_params * setup.sent_gradient_bytes)
        parts = (
            num_params * of_parameter,
            num_params * of_gradient,
            num_params * of_state,
            load.activation_bytes,
            buffers,
        )
        peak = parts[0] + parts[1] + parts[2] + parts[3] + parts[4]
        if peak > most:
            found, most = parts, peak
    return RankMemory(*(found or (0.0,) * 5))


def not_exceeded(loads: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the loads, each as its sizes, of which no other one has at least as much of everything; each once."""
    kept: list[tuple[float, ...]] = []
    for sizes in sorted(set(loads), reverse=True):  # whatever exceeds one comes before it
        if not any(all(map(operator.ge, other, sizes)) for other in kept):
            kept.append(sizes)
    return kept


def together(memories: Sequence[RankMemory], copies: int) -> RankMemory:
    """Return the memory of a process that holds so many copies of all of these."""
    return RankMemory(
        *(copies * sum(getattr(memory, field.name) for memory in memories) for field in dataclasses.fields(RankMemory))
    )
