"""Bytes that stages send: to each other, and over tensor parallelism beside their layers' own exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from meshwright.plan.costs.layer_times import LayerTimes
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.stages_on_ranks import StagesOnRanks
from meshwright.traffic import cut_activation_bytes, ring_gradient_bytes

__all__: list[str] = []

_GATHERED: Final = 2
"""Sequences that a block's products read: attention's, and the MLP's [count]."""


def pipeline_bytes(
    layers: Sequence[LayerTimes], placed: StagesOnRanks, setup: Setup, shared: Sequence[tuple[Sequence[int], int]]
) -> float:
    """Return what a pp rank sends in the mean: activations, their gradients, and gradients of shared parameters [bytes].

    Args:
        layers: Costs of the layers, in order.
        placed: Their stages.
        setup: Degrees, batch and numerics.
        shared: For each shared parameter the places of its layers, and its elements [count].
    """
    if setup.pp == 1:
        return 0.0
    # Stages hand on whole sequences, also where layers run on slices of them.
    slices = setup.tp if setup.sequence_parallel else 1
    handed_on = [round(layers[end - 1].input_bytes * slices) for end in placed.bounds[1:]]
    messages = cut_activation_bytes(handed_on, placed.ranks, setup.micro_batches)
    if setup.schedule == "sequential":
        return (messages + _returned_bytes(layers, placed, shared)) / setup.pp
    tied = 0.0
    for places, num_params in shared:
        holders = len({placed.rank_of(place) for place in places})
        tied += holders * ring_gradient_bytes(num_params / setup.tp * setup.states.gradient, holders)
    return (messages + tied) / setup.pp


def _returned_bytes(
    layers: Sequence[LayerTimes], placed: StagesOnRanks, shared: Sequence[tuple[Sequence[int], int]]
) -> float:
    """Return what goes back where one process runs a layer on the device of the weights that it shares [bytes]."""
    moved = 0.0
    for places, _ in shared:
        home = placed.rank_of(places[0])
        moved += sum(2 * layers[one - 1].input_bytes for one in places[1:] if placed.rank_of(one) != home)
    return moved


def chain_bytes(layers: Sequence[LayerTimes], placed: StagesOnRanks, setup: Setup) -> float:
    """Return what gathers the sequence behind each stage's layers on slices, and its gradient, over all stages [bytes].

    Source:
        Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    if not setup.sequence_parallel:
        return 0.0
    found = 0.0
    for first, last in itertools.pairwise(placed.bounds):
        in_slices = (layer.input_bytes for layer in reversed(layers[first:last]) if layer.runs_on_slices)
        found += 2 * (setup.tp - 1) * next(in_slices, 0.0)
    return found


def repeated_bytes(times: LayerTimes, setup: Setup) -> float:
    """Return what one layer keeps while it is run again [bytes]: whole sequences that products read, where they were gathered."""
    kept = times.saved_bytes + times.cast_bytes
    if setup.keeps_gathered and times.runs_on_slices:
        kept += _GATHERED * (setup.tp - 1) * times.input_bytes
    return kept


def partial_bytes(elements: float, setup: Setup) -> float:
    """Return what sums the gradients of so many parameters that ran on slices, in a step of all stages [bytes]."""
    return ring_gradient_bytes(elements * setup.states.gradient, setup.tp)
