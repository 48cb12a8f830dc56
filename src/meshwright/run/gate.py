"""Gate around `optimizer.step()`, which refuses loops of the user's own over a model that exchanges gradients only in `step`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.errors import ApplyError
from meshwright.trees import map_tensors

__all__: list[str] = []

FIX = (
    "call model.step(batch), which runs forward, loss, backward and the optimizer (micro_batches= in the plan accumulates); "
    "for a loop of your own use the plan 'single', or torch's DistributedDataParallel without apply_plan"
)

_PLANS: weakref.WeakKeyDictionary[nn.Module, str] = (
    weakref.WeakKeyDictionary()
)  # module -> the plan that has cut or copied it


def plan_over(module: object) -> str | None:
    """Return the plan under which a module's gradients are exchanged only in `step`, or None."""
    return _PLANS.get(module) if isinstance(module, nn.Module) else None


class OptimizerGate:
    """Allows an optimizer to step only inside `Stepper.step`, once it is shut.

    It is created before an engine adds hooks to the optimizer, so that it refuses before anything is exchanged.

    Args:
        optimizer: The optimizer, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._plan = ""
        self._module: nn.Module | None = None
        self._is_open = True
        self._undo: Callable[[], None] | None = None
        self.before_step: Callable[[], None] | None = None
        """Called before each step of the optimizer, whoever calls that."""
        self._attach(optimizer)

    def _attach(self, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            # A hook, not a replaced `step`, which learning rate schedulers wrap and whose calls they count.
            self._undo = optimizer.register_step_pre_hook(self._check).remove
        elif optimizer is not None:
            step = optimizer.step

            @functools.wraps(step)
            def checked(*args: Any, **kwargs: Any) -> Any:
                self._check()
                return step(*args, **kwargs)

            optimizer.step = checked
            self._undo = functools.partial(setattr, optimizer, "step", step)

    def shut(self, module: nn.Module, plan: str) -> None:
        """Refuse steps outside `opened` from now on.

        Args:
            module: The module that the optimizer trains.
            plan: The plan, for the error.
        """
        self._is_open, self._module, self._plan = False, module, plan
        _PLANS[module] = plan

    def _check(self, *_: Any) -> None:
        if not self._is_open:
            raise ApplyError(
                f"{type(self._optimizer).__name__}.step() was called outside of model.step() under the plan "
                f"'{self._plan}': gradients are summed over its devices in model.step() alone, so each would train on its "
                "own share of the batch",
                fix=FIX,
            )
        if self.before_step is not None:
            self.before_step()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allow the optimizer to step inside the context."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def close(self) -> None:
        """Remove the gate's hooks."""
        if self._undo is not None:
            self._undo()
        if self._module is not None:
            _PLANS.pop(self._module, None)
        self._undo, self._module, self._is_open = None, None, True
        self.before_step = None


class _NoBackward(torch.autograd.Function):
    """The identity, whose backward raises an error that says what to do instead."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _: torch.Tensor, plan: str) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.plan = plan
        return tensor.clone()  # torch would refuse a user's in-place loss on a view

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ApplyError(
            f"backward was called on outputs of model(...) under the plan '{ctx.plan}': other ranks hold parts of the "
            "values, and outputs come without a graph",
            fix=FIX,
        )


def without_backward(outputs: Any, plan: str) -> Any:
    """Return outputs without a graph, whose backward raises an error; unchanged where gradients are disabled."""
    if not torch.is_grad_enabled():
        return outputs
    root = torch.empty(0, requires_grad=True)

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        can = tensor.is_floating_point() or tensor.is_complex()
        return _NoBackward.apply(tensor, root, plan) if can and not tensor.requires_grad else tensor

    return map_tensors(outputs, refuse)
