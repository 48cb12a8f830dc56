"""Random float64 values of a scope's parameters and buffers; all runs and experiments with the scope share one set."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module

__all__: list[str] = []

_SEED = 20260
_LARGE = 10**6
"""Entries of a scope's parameters from which the collector is run after each use [count]."""


class ScopeValues:
    """Values with which a scope is tried. Copies of it share the parameters' memory until one writes into them.

    Args:
        scope: The module.
    """

    def __init__(self, scope: nn.Module) -> None:
        self.scope = scope
        self._is_large = sum(parameter.numel() for parameter in scope.parameters()) >= _LARGE
        self.collect()  # an earlier scope's
        self._are_written = False
        self._draw()

    def _draw(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        shared = {id(parameter): _random(parameter, generator) for parameter in self.scope.parameters()}
        self._shared = list(shared.values())
        self._values = shared | {id(buffer): _of_buffer(buffer, generator) for buffer in self.scope.buffers()}
        self._state = generator.get_state()
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        return [value._version for value in self._shared]

    def collect(self) -> None:
        """Free copies that were run, where they are large: modules refer to themselves, and keep shards and gradients."""
        if self._is_large:
            gc.collect()

    def generator(self) -> torch.Generator:
        """Return a generator that goes on where the values end, the same each time."""
        return torch.Generator().set_state(self._state)

    def fresh(self) -> nn.Module:
        """Return a copy of the scope that may be run."""
        # What is frozen now may be trained later.
        return copy_module(self.scope, self._new, trainable=True)

    def _new(self, tensor: Tensor) -> Tensor:
        value = self._values[id(tensor)].detach()
        return value if isinstance(tensor, nn.Parameter) and not self._are_written else value.clone()

    def were_written(self) -> bool:
        """Tell whether a run has written into parameters since the last call; each copy has its own from then on."""
        if self._read_versions() == self._versions:
            return False
        self._are_written = True
        self._draw()
        return True


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    if not parameter.is_floating_point():
        return as_double(parameter.detach().cpu()).clone()
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
    return noise.mul_(fan_in**-0.5) if parameter.dim() > 1 else noise.mul_(0.2).add_(0.6)


def _of_buffer(buffer: Tensor, generator: torch.Generator) -> Tensor:
    value = as_double(buffer.detach().cpu())
    if not value.is_floating_point() or value.numel() < 2 or value.min() != value.max():
        return value
    # A running mean of zeros and the like: one entry could stand for another.
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return value * (1.0 + 0.1 * noise) + 0.01 * noise


def as_double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
