"""Types of gradients, which follow from those of the forward.

The gradient of a shard is a shard; that of a term of a sum is the same on all ranks. The gradient of a replicated tensor depends
on its uses. A use that stays replicated gives a gradient equal on all ranks; a use in a shard or a term gives each rank a term.
Both at once cannot be corrected by any exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.apply.tensor.types.lattice import RefusedError, Typed

__all__: list[str] = []

_NEEDS_SAME = frozenset(["reduce", "gather", "scatter", "module"])
"""They give what all ranks compute alike."""
_NEEDS_TERMS = frozenset(["copy", "all_gather"])
"""They add up the gradients."""


class Tape:
    """Record of which tensors were made from which."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, list[Typed], list[Typed]]] = []

    def add(self, kind: str, inputs: Sequence[Typed], outputs: Sequence[Typed]) -> None:
        """Record a call: an exchange by its name, or an "operation"."""
        wanted = [value for value in inputs if value.tensor.requires_grad]
        if wanted:
            self._steps.append((kind, wanted, list(outputs)))

    def go_back(self, outputs: Sequence[Typed]) -> None:
        """Derive the kinds of every tensor's gradient, from the outputs on, whose own are the same on all ranks.

        Raises:
            RefusedError: A gradient would be summed twice, or not at all; `value` names the tensor.
        """
        for value in outputs:
            value.gradients.add("own" if value.type.dim is not None else "same")
        for kind, inputs, made in reversed(self._steps):
            arriving = set().union(*(value.gradients for value in made)) if made else set()
            if arriving:
                self._hand_on(kind, inputs, made, arriving)

    def _hand_on(self, kind: str, inputs: list[Typed], made: list[Typed], arriving: set[str]) -> None:
        if kind in _NEEDS_TERMS and "same" in arriving:
            raise GradientError(inputs[0], "is the same on all ranks, and would be added once for each")
        if kind in _NEEDS_SAME and "term" in arriving:
            raise GradientError(made[0], "is a term of a sum on each rank, which nothing adds up")
        is_exchange = kind != "operation"
        for value in inputs:
            if value.type.dim is not None:
                value.gradients.add("own")
            elif value.type.kind == "partial" or is_exchange:
                value.gradients.add("same")
            elif any(result.gradients and result.type.kind != "replicated" for result in made):
                value.gradients.add("term")
                value.gradients |= set().union(*(r.gradients for r in made if r.type.kind == "replicated"))
            else:
                value.gradients |= arriving
            if {"same", "term"} <= value.gradients and value.type.kind == "replicated":
                raise GradientError(
                    value, "is partly the same on all ranks and partly a term of a sum: no exchange gives it"
                )


class GradientError(RefusedError):
    """The gradient of a tensor is not one device's."""

    def __init__(self, value: Typed, why: str) -> None:
        super().__init__(f"the gradient {why}")
        self.value = value
