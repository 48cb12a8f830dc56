"""Models that compute gradients, or take a step, inside of their forward."""

from __future__ import annotations

import copy

import torch
from tests.parity.jobs.never_wrong_pipeline_states import Stack, tanh_block
from torch import Tensor, nn


class Penalty(nn.Module):
    """A gradient penalty: a backward through all layers, inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tanh_block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = x
        for block in self.blocks:
            h = block(h)
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + slope


class Slopes(nn.Module):
    """Layers that add their own slope, and copy a tensor deeply meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sloped() for _ in range(4))

    forward = Stack.forward


class Sloped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = tanh_block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = copy.deepcopy(x.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(self.body(at).square().sum(), at, create_graph=True)
        return self.body(x) + slope


class InnerStep(nn.Module):
    """An inner step of training (MAML), after which the layers run with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[tanh_block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * 0.9 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, (x,))
