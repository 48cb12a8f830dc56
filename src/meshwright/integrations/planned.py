"""The model under a plan as other people's loops see it: called, switched and zeroed like a module, read like the user's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = []


class PlannedModule:
    """Calls of a wrapped module, handed to the model under a plan; every other attribute is the user's module's.

    Args:
        parallel: What `apply_plan` returned.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel = parallel

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.parallel.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallel(*args, **kwargs)

    def train(self, mode: bool = True) -> PlannedModule:
        """Set training mode, or evaluation mode; return this object."""
        self.parallel.train(mode)
        return self

    def eval(self) -> PlannedModule:
        """Set evaluation mode; return this object."""
        return self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - nn.Module's signature
        """Drop all gradients."""
        self.parallel.zero_grad()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["parallel"].module, name)
