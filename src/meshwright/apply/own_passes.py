"""Forwards and backwards that a user's own loop drives, in place of `Engine.run`; the base of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__: list[str] = []

Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that hold gradients, each with the gradient of earlier backwards."""


class OwnPasses:
    """What an own loop asks of a strategy.

    For each forward `own_forward`. For each backward, in this order: `take_gradients`, `begin_own_backward`, autograd's backward,
    `end_own_backward`, `finish_gradients`, `end_own_exchange`, `add_gradients`. Every rank calls all of them.
    """

    parameters: list[nn.Parameter]

    takes_own_loops = True
    """Whether a backward may be run from outputs of `own_forward`."""

    def begin_step(self) -> None:
        """Drop the last step's gradients."""
        raise NotImplementedError

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs for these inputs."""
        raise NotImplementedError

    def own_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs for these inputs, with their graph."""
        return self.forward(args, kwargs)

    def streams(self) -> Any:
        """Return what a repeated forward in backward needs to know of the last forward, for `set_streams`."""
        return None

    def set_streams(self, streams: Any) -> None:
        """Restore what `streams` returned."""

    def gradient_holders(self) -> Sequence[torch.Tensor]:
        """Return the tensors whose `.grad` holds this rank's part of the whole gradient after `finish_gradients`."""
        return self.parameters

    def drop_cleared_gradients(self) -> None:
        """Drop gradients that a script has set to None where this rank's part of them lies elsewhere."""

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        self.begin_step()

    def take_gradients(self) -> Kept:
        """Take the gradients of earlier backwards away, so that the next one's are exchanged alone."""
        self.drop_cleared_gradients()
        kept: Kept = []
        for holder in self.gradient_holders():
            if holder.grad is not None:
                kept.append((holder, holder.grad))
                holder.grad = None
        return kept

    @staticmethod
    def add_gradients(kept: Kept) -> None:
        """Add what `take_gradients` returned to the gradients that have come since."""
        with torch.no_grad():
            for holder, gradient in kept:
                if holder.grad is None:
                    holder.grad = gradient
                elif holder.grad.is_sparse or gradient.is_sparse:
                    total = holder.grad + gradient
                    holder.grad = total.coalesce() if total.is_sparse else total
                else:
                    holder.grad.add_(gradient)

    def begin_own_backward(self, *, is_alone: bool) -> None:  # noqa: ARG002 - for strategies that gather values
        """Prepare for a backward.

        Args:
            is_alone: Whether its graph holds one forward of one model.
        """
        self.drop_gradients()

    def end_own_backward(self) -> None:
        """End the backward; its gradients have arrived."""

    def end_own_exchange(self) -> None:
        """Take note that `finish_gradients` is over."""
