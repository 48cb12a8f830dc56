"""Time and bytes of data parallelism and ZeRO in a step."""

from __future__ import annotations

import dataclasses
from typing import Final

from meshwright.hardware.cluster import HOST_DEVICE
from meshwright.plan.costs.machine import Machine
from meshwright.plan.costs.setup import Setup
from meshwright.traffic import replica_copy_bytes, ring_gradient_bytes, sharded_bytes

__all__: list[str] = []

_ADAPTER_SHARE: Final = 0.005
"""Trained parameters over all, where adapters alone are trained: LoRA of rank 16. An estimate [ratio]."""

_COPY_HOST: Final = 0.3
"""Host time of a copy and of the view that it is made into, over that of the mean operator [ratio]: as a cast's, which
benchmarks/planner/cast_times.py measures."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataParallelCost:
    """What data parallelism adds to a step of one rank."""

    exposed_s: float
    sent_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Hidden:
    """An exchange, and the computation that can hide it."""

    seconds: float
    room_s: float


def exchange(
    setup: Setup,
    machine: Machine,
    *,
    num_params: float,
    forward_s: float,
    backward_s: float,
    depth: float,
    whole_share: float = 0.0,
) -> DataParallelCost:
    """Return the time that nothing hides, and the bytes that a rank sends.

    Args:
        setup: Degrees, batch and numerics.
        machine: The cluster.
        num_params: Elements of this rank's parameters [count].
        forward_s: Forward of all micro-batches on this rank [s].
        backward_s: Backward of all micro-batches, recompute included [s].
        depth: Layers of this rank, each of which can be exchanged while others run [count].
        whole_share: Share of the parameters that lie in layers too small for ZeRO-3 to shard [ratio].

    Source:
        Volumes: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 7: twice the parameters for stages 0 to 2, three
        times for stage 3.
    """
    group = setup.dp * setup.cp
    if group == 1:
        return DataParallelCost(0.0, 0.0)
    trained = num_params * (1.0 if setup.trains_weights else _ADAPTER_SHARE)
    if setup.one_process:
        return _of_replicas(setup, machine, num_params, trained)
    whole = (whole_share if setup.zero >= 3 else 1.0) * trained * setup.gathered_bytes
    # What ZeRO-3 gathers where it is needed; stages below gather once what the optimizer has changed.
    gathered = num_params * (1 - whole_share) * setup.gathered_bytes if setup.zero >= 3 else whole
    reduced = trained * setup.sent_gradient_bytes
    across_copies = trained * (setup.replicas_gradient_bytes or setup.sent_gradient_bytes)
    shard = setup.shard if setup.zero else 1
    in_shard, across = _hosts(setup, machine, shard), _hosts(setup, machine, group)
    # What overlaps, and what is gathered where it is needed, goes in pieces.
    pieces = max(1.0, depth * setup.calls_per_layer) if setup.overlap or setup.zero == 3 else 1.0

    def seconds(kind: str, num_bytes: float, ranks: int, hosts: int) -> float:
        return pieces * machine.collective_s(kind, num_bytes / pieces, ranks, hosts)

    # A list of tensors, one for each rank, is copied from or into what is sent, one by one.
    listed_s = pieces * setup.copies_per_rank * shard * _COPY_HOST * machine.efficiency.operator_s if shard > 1 else 0.0
    gather_s = seconds("all_gather", gathered, shard, in_shard) + listed_s
    # ZeRO scatters sums over its shards, and copies of a shard are then summed.
    scatter_s = seconds("reduce_scatter", reduced, shard, in_shard) + listed_s
    sum_s = seconds("all_reduce", across_copies / shard, group // shard, min(across, group // shard))
    if setup.zero >= 3 and not setup.per_step:
        calls = setup.micro_batches  # each gathers in forward and in backward, and scatters its gradients
        before = _Hidden(calls * gather_s, forward_s)
        after = _Hidden(calls * (gather_s + scatter_s) + sum_s, backward_s)
    elif setup.per_step:
        before, after = _Hidden(gather_s, 0.0), _Hidden(scatter_s + sum_s, 0.0)
    else:
        # The last micro-batch's backward hides the sums, the first one's forward the gathering of updated parameters.
        # Interleaved stages end one after the other: what one exchanges hides behind the rest of the others.
        rooms = setup.micro_batches
        calls = (
            setup.micro_batches if setup.zero == 2 else 1
        )  # sums of a micro-batch are scattered before the next one's
        before = _Hidden(gather_s if setup.zero else 0.0, forward_s / rooms)
        after = _Hidden(calls * scatter_s + sum_s, backward_s * calls / rooms)
    sent = _sent_bytes(setup, (whole, gathered), reduced, across_copies, group)
    return DataParallelCost(_exposed_s(setup, machine, before, after, depth), sent)


def _of_replicas(setup: Setup, machine: Machine, num_params: float, trained: float) -> DataParallelCost:
    """Return what replicas of one process exchange: values to the other devices, gradients back; a CPU's are one device."""
    others = 0 if machine.cluster.device.name == HOST_DEVICE else setup.dp - 1
    values, gradients = round(num_params * setup.gathered_bytes), round(trained * setup.sent_gradient_bytes)
    moved = replica_copy_bytes(values, gradients, others)
    return DataParallelCost(machine.message_s(moved, inside=True) if moved else 0.0, moved / setup.dp)


def _sent_bytes(setup: Setup, values: tuple[float, float], reduced: float, across_copies: float, group: int) -> float:
    if not setup.zero:
        return ring_gradient_bytes(reduced, group)
    kept_whole, sharded = values if setup.zero >= 3 else (values[0], 0.0)
    return sharded_bytes(
        reduced,
        kept_whole,
        sharded,
        zero=setup.zero,
        shards=setup.shard,
        replicas=group // setup.shard,
        passes=setup.micro_batches,
        per_step=setup.per_step,
        replicated_bytes=across_copies,
    )


def _exposed_s(setup: Setup, machine: Machine, before: _Hidden, after: _Hidden, depth: float) -> float:
    """Return what sticks out of forward and backward, and what the rest slows them down by [s]."""
    total = before.seconds + after.seconds
    if not setup.overlap:
        return total
    share = machine.efficiency.overlap
    # The first layer's exchange in forward, and the last one's in backward, hide behind nothing.
    alone = 1 / max(2.0, depth)
    exposed = sum(max(alone * one.seconds, one.seconds - share * one.room_s) for one in (before, after))
    return exposed + machine.efficiency.interference * (total - exposed)


def _hosts(setup: Setup, machine: Machine, group: int) -> int:
    """Return the hosts that so many dp neighbours are on; tp ranks are neighbours, and pp ranks farthest apart [count]."""
    in_host = machine.cluster.devices_per_host
    if setup.num_devices <= in_host:
        return 1
    per_host = min(group, max(1, in_host // min(setup.tp, in_host)))
    return -(-group // per_host)
