"""Random float64 values of a scope's parameters and buffers; all runs and experiments with the scope share one set."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module
from meshwright.ranks.allocator import return_freed_memory
from meshwright.trees import tensors_in

__all__: list[str] = []

_SEED = 20260
_LARGE = 10**6
"""Entries of a scope's parameters from which the collector is run after each use [count]."""

_LARGE_INPUTS = 2**16
"""The same of a call's inputs: a block of a transformer keeps some thirty times as many for backward [count]."""

_WHOLE_EVERY = 8
"""Collections of which one looks at all objects [count]."""


class LastDrawn:
    """The values of the scope that was tried last. A scope whose parameters have the same shapes takes them over."""

    def __init__(self) -> None:
        self._shapes: list[tuple[int, ...] | None] = []
        self._values: list[Tensor] = []
        self._versions: list[int] = []
        self._state = torch.Tensor()

    def draw(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return values for parameters, and the state of the generator after them."""
        # None: a parameter whose own values count.
        shapes = [tuple(p.shape) if p.is_floating_point() else None for p in parameters]
        # A run that raised has told nobody of what it wrote.
        are_written = versions_of(self._values) != self._versions
        if not self._values or are_written or None in shapes or shapes != self._shapes:
            self._values = []  # first of all: both together would need twice the memory
            if sum(math.prod(shape or ()) for shape in shapes) > _LARGE:
                # Runs with other shapes have left a heap of free blocks, of which this one's fit into few.
                return_freed_memory()
            generator = torch.Generator().manual_seed(_SEED)
            self._values = [_random(parameter, generator) for parameter in parameters]
            self._shapes, self._state = shapes, generator.get_state()
            self._versions = versions_of(self._values)
        return self._values, self._state


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each has been written into [count]."""
    return [tensor._version for tensor in tensors]


class ScopeValues:
    """Values with which a scope is tried. Copies of it share the parameters' memory until one writes into them.

    Args:
        scope: The module.
        last: What the scope before it was tried with.
    """

    _num_collections: ClassVar[int] = 0

    def __init__(self, scope: nn.Module, last: LastDrawn | None = None) -> None:
        self.scope = scope
        self.is_large = sum(parameter.numel() for parameter in scope.parameters()) >= _LARGE
        """Whether results are worth to be let go."""
        self.collect()  # an earlier scope's
        self._are_written = False
        self._last = last or LastDrawn()
        self._draw()

    def _draw(self) -> None:
        parameters = list(self.scope.parameters())
        self._shared, state = self._last.draw(parameters)
        generator = torch.Generator().set_state(state)
        shared = {id(parameter): value for parameter, value in zip(parameters, self._shared, strict=True)}
        self._values = shared | {id(buffer): _of_buffer(buffer, generator) for buffer in self.scope.buffers()}
        self._state = generator.get_state()
        self._versions = versions_of(self._shared)

    def collect(self, inputs: Any = None) -> None:
        """Free copies that were run, where they or what they were run with are large: they refer to themselves, and keep it."""
        if self.is_large or sum(tensor.numel() for tensor in tensors_in(inputs)) >= _LARGE_INPUTS:
            # All but the oldest objects: what a run made is young, and a whole collection takes a tenth of a second.
            ScopeValues._num_collections += 1
            gc.collect(1 if ScopeValues._num_collections % _WHOLE_EVERY else 2)

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

    @property
    def are_shared(self) -> bool:
        """Whether copies share the parameters' memory; none has written into them so far."""
        return not self._are_written

    def count_write(self) -> None:
        """Count a write into shards in that memory: torch counts it for the shard alone."""
        with torch.no_grad():
            for value in self._shared:
                value.add_(0)

    def were_written(self) -> bool:
        """Tell whether a run has written into parameters since the last call; each copy has its own from then on."""
        if versions_of(self._shared) == self._versions:
            return False
        self._are_written = True
        self._draw()
        return True


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    if not parameter.is_floating_point():
        return as_double(parameter.detach().cpu()).clone()
    # Even numbers of variance 1: they are drawn in a fifth of the time of normal ones.
    noise = torch.empty(parameter.shape, dtype=torch.float64).uniform_(-(3**0.5), 3**0.5, generator=generator)
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
