"""Losses whose backward is code of their own, or that keep something of one batch for the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw


class Annealed:
    """A loss with a penalty that grows by a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        self.calls += 1
        return pairs(outputs, given) + min(1.0, self.calls / 10) * outputs.square().mean()


def pairs(outputs: Tensor, given: Any) -> Tensor:
    """Return the mean of squared differences."""
    return (outputs - given[1]).square().mean()


def as_sum(outputs: Tensor, given: Any) -> mw.Loss:
    """Return the same as a sum."""
    return mw.Loss((outputs - given[1]).square().mean(1).sum(), len(outputs))


def balanced(outputs: Tensor, given: Any) -> Tensor:
    """Return two losses, each by the size of its gradient, which is there in training alone."""
    terms = [(outputs[:, column] - given[1][:, column]).square().mean() for column in (0, 1)]
    if not outputs.requires_grad:
        return terms[0] + terms[1]
    sizes = [torch.autograd.grad(term, outputs, retain_graph=True)[0].norm().detach() for term in terms]
    return terms[0] / sizes[0] + terms[1] / sizes[1]


class Averaged:
    """A loss by a running average of itself."""

    def __init__(self) -> None:
        self.average: Tensor | None = None

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        loss = pairs(outputs, given)
        now = loss.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss / self.average


class Centring(nn.Module):
    """A loss with a centre of all outputs, as DINO's, in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, given: Any) -> Tensor:
        loss = (outputs - given[1] - self.centre).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return loss


class Logging:
    """A loss that keeps its values for people alone."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        loss = pairs(outputs, given)
        self.values.append(loss.item())
        return loss


LOSSES = {"pairs": lambda: pairs, "as_sum": lambda: as_sum, "balanced": lambda: balanced}
LOSSES |= {"Averaged": Averaged, "Centring": Centring, "Logging": Logging, "Annealed": Annealed}
