"""Layers of a model by kind, and what all of them take: equal layers are costed once."""

from __future__ import annotations

import dataclasses

from meshwright.plan.costs.layer_times import LayerTimes
from meshwright.spec.layer import LayerSpec
from meshwright.spec.model import ModelSpec

__all__: list[str] = []

Sums = tuple[float, ...]
"""Sums of the layers' values up to each layer: 0, the first, the first two, and so on."""


@dataclasses.dataclass(slots=True)
class LayersCost:
    """What the layers take for one micro-batch, as sums in their order."""

    kinds: tuple[LayerTimes, ...]
    """Each kind's cost."""
    forward_s: Sums
    backward_s: Sums
    recompute_s: Sums
    totals_s: Sums
    """Of the three, and of adding up gradients."""
    of_kinds_s: tuple[float, ...]
    """The same of each kind."""
    num_params: Sums
    kept_bytes: Sums
    issued_s: Sums
    """Of forward: what the host issues, which threads of one process do in turns."""


def kinds_of(model: ModelSpec) -> tuple[list[LayerSpec], list[int]]:
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
        kind = known.setdefault((*sums, layer.operators, layer.host), len(kinds))
        if kind == len(kinds):
            kinds.append(layer)
        of_layers.append(kind)
    return kinds, of_layers
