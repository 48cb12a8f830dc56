"""Gate around `optimizer.step()`, which refuses loops of the user's own over a model that exchanges gradients only in `step`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.apply.shards.switch import ShardSwitch
from meshwright.errors import ApplyError
from meshwright.run.arrivals import GradientArrivals
from meshwright.trees import map_tensors

__all__: list[str] = []

FIX = (
    "call model.step(batch), which runs forward, loss, backward and the optimizer (micro_batches= in the plan accumulates); "
    "in a loop of your own call model.backward(loss, weight=n) in place of loss.backward(), then model.optimizer.step(); inner "
    "steps by a gradient of your own (MAML) have the plan 'single' alone"
)
FIX_STEP = (
    "call model.step(batch), which runs forward, loss, backward and the optimizer (micro_batches= in the plan accumulates); "
    "for a loop of your own use a plan of dp, zero and tp"
)

_PLANS: weakref.WeakKeyDictionary[nn.Module, str] = (
    weakref.WeakKeyDictionary()
)  # module -> the plan that has cut or copied it


def plan_over(module: object) -> str | None:
    """Return the plan under which a module's gradients are exchanged only in `step`, or None."""
    return _PLANS.get(module) if isinstance(module, nn.Module) else None


class StepsByHand(Protocol):
    """An own loop, as its gate uses it."""

    def before_optimizer(self, closure: Any) -> None:
        """Prepare for the optimizer's step."""
        ...

    def after_optimizer(self) -> None:
        """Take over what the optimizer has written."""
        ...

    def note_clip(self, call: str) -> None:
        """Note a call that clips the gradient on each rank by itself."""
        ...

    def has_pending(self) -> bool:
        """Whether there are gradients that the optimizer has not used."""
        ...


class OptimizerGate:
    """Allows an optimizer to step only inside `Stepper.step`, or on gradients of `model.backward`, once it is shut.

    It is created before an engine adds hooks to the optimizer, so that it refuses before anything is exchanged.

    Args:
        optimizer: The optimizer, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._plan, self._fix = "", FIX
        self._module: nn.Module | None = None
        self._is_shut = self._is_in_step = False
        self._undo: Callable[[], None] | None = None
        self._arrivals: GradientArrivals | None = None
        self._own: weakref.ref[StepsByHand] | None = None
        self.has_own_gradients = False
        """Whether the gradients are those of `model.backward`."""
        self.before_step: Callable[[], None] | None = None
        """Called before each step of the optimizer, whoever calls that."""
        self._attach(optimizer)

    @property
    def own(self) -> StepsByHand | None:
        """The own loop over the model; not held, so that a model which nobody has any more goes at once, with its threads."""
        return None if self._own is None else self._own()

    @own.setter
    def own(self, loop: StepsByHand | None) -> None:
        self._own = None if loop is None else weakref.ref(loop)

    def _attach(self, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            # A hook, not a replaced `step`, which learning rate schedulers wrap and whose calls they count.
            hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
            self._undo = functools.partial(_remove, hooks)
        elif optimizer is not None:
            step = optimizer.step

            @functools.wraps(step)
            def checked(*args: Any, **kwargs: Any) -> Any:
                self._before(optimizer, args, kwargs)
                result = step(*args, **kwargs)
                self._after()
                return result

            optimizer.step = checked
            self._undo = functools.partial(setattr, optimizer, "step", step)

    def shut(
        self, module: nn.Module, plan: str, switch: ShardSwitch, *, takes_own_loops: bool, has_ranks: bool
    ) -> None:
        """Refuse steps outside `opened`, and gradients of the script's own, from now on.

        Args:
            module: The module that the optimizer trains.
            plan: The plan, for errors.
            switch: Tells whether the engine computes, or the user's code runs.
            takes_own_loops: Whether `model.backward` is there.
            has_ranks: Whether gradients are exchanged between ranks.
        """
        self._is_shut, self._module, self._plan = True, module, plan
        self._fix = FIX if takes_own_loops else FIX_STEP
        _PLANS[module] = plan
        if has_ranks:
            self._arrivals = GradientArrivals(module, switch, plan, self._fix)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_in_step and (own := self.own) is not None and self.has_own_gradients:
            given = [item for item in (*args, *kwargs.values()) if item is not self._optimizer]
            own.before_optimizer(next(iter(given), None))
        elif not self._is_in_step and self._is_shut:
            raise ApplyError(
                f"{type(self._optimizer).__name__}.step() was called outside of model.step() under the plan "
                f"'{self._plan}', and without model.backward(): gradients are summed over its devices there alone, so each "
                "would train on its own share of the batch",
                fix=self._fix,
            )
        if self.before_step is not None:
            self.before_step()

    def _after(self, *_: Any) -> None:
        if not self._is_in_step and (own := self.own) is not None:
            own.after_optimizer()

    def expecting_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Return a context of the engine's own backwards, in which gradients are not watched."""
        return contextlib.nullcontext() if self._arrivals is None else self._arrivals.put_aside()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allow the optimizer to step inside the context."""
        before, self._is_in_step = self._is_in_step, True
        try:
            yield
        finally:
            self._is_in_step = before

    def close(self) -> None:
        """Remove the gate's hooks."""
        if self._undo is not None:
            self._undo()
        if self._module is not None:
            _PLANS.pop(self._module, None)
        if self._arrivals is not None:
            self._arrivals.close()
        self._undo, self._module, self._arrivals, self._is_shut = None, None, None, False
        self.before_step = self.own = None


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


class _NoBackward(torch.autograd.Function):
    """The identity, whose backward raises an error that says what to do instead."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _: torch.Tensor, plan: str) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.plan = plan
        return tensor.clone()  # torch would refuse a user's in-place loss on a view

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ApplyError(
            f"backward was called on outputs of model(...) under the plan '{ctx.plan}': outputs come without a graph, since "
            "forward and backward are one work of several stages or threads there",
            fix=FIX_STEP,
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
