"""Groups of an optimizer over pieces of parameters: those that a script has changed, and what it may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.data.optimizer import hand_over_pieces
from meshwright.errors import ApplyError

__all__: list[str] = []


class PieceGroups:
    """The pieces in each group of an optimizer, as they were when its groups were accepted last.

    Args:
        zero: The stage of ZeRO, for errors.
    """

    def __init__(self, zero: int) -> None:
        self._zero = zero
        self._held: list[tuple[Mapping[str, Any], set[int]]] = []

    def note(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Take note of an optimizer's groups."""
        groups = () if optimizer is None else optimizer.param_groups
        self._held = [(group, set(map(id, group["params"]))) for group in groups]

    def accept(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: Mapping[int, Sequence[nn.Parameter]],
        others: Iterable[nn.Parameter],
    ) -> ApplyError | None:
        """Replace the whole parameters of added groups by this rank's pieces of them, or return why that cannot be.

        Args:
            optimizer: The optimizer, whose groups have changed.
            pieces: id of a parameter -> this rank's pieces of it.
            others: Parameters of the model that every rank has whole.
        """
        name, lost = type(optimizer).__name__, self._count_lost(optimizer)
        if lost:
            return ApplyError(
                f"a group of {name} has lost {lost} of its entries: under zero={self._zero} these are pieces of parameters, and "
                "each rank has other ones, so that a choice among them is not one among the model's parameters",
                fix="switch requires_grad off for what shall not be trained, or give it a group of its own from the start",
            )
        hand_over_pieces(optimizer, pieces)
        own = {id(piece) for held in pieces.values() for piece in held} | {id(parameter) for parameter in others}
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len({id(parameter) for parameter in params}) < len(params):
            return ApplyError(
                f"a group of {name} was added with parameters that another group holds already",
                fix="add each parameter once",
            )
        strange = [parameter for parameter in params if id(parameter) not in own]
        if strange:
            return ApplyError(
                f"{len(strange)} parameters of {name}, one of shape {tuple(strange[0].shape)} for example, are not of this "
                f"model, and zero={self._zero} sums no gradients for them",
                fix="add parameters that model.parameters() has",
            )
        self.note(optimizer)
        return None

    def _count_lost(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many pieces groups have lost that are still there; `load_state_dict` makes each anew, in its place."""
        groups = optimizer.param_groups
        known = {id(group): {*map(id, group["params"])} for group in groups}
        lost = 0
        for place, (group, ids) in enumerate(self._held):
            now = known.get(id(group), set())
            if id(group) not in known and place < len(groups):
                now = known[id(groups[place])]
            if now & ids or id(group) in known:
                lost += len(ids - now)
        return lost
