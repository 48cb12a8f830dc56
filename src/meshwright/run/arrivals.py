"""Gradients that reach a model's parameters outside of its step: refused, since nothing would exchange them between the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright.apply.modules.hooks import OwnHook
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.errors import ApplyError

__all__: list[str] = []


class GradientArrivals:
    """Watches the parameters of a module under a plan whose ranks exchange gradients.

    A gradient of an own `loss.backward()` or `torch.autograd.grad` is of this rank's share alone. Whatever is made of it (a
    second optimizer, an update by hand, clipping) would train each rank apart, so it is refused where it arrives.

    Args:
        module: The module; frozen parameters are watched too, since they may be switched on.
        switch: Tells whether the engine computes, or the user's code runs.
        plan: The plan, for the error.
        fix: What to call instead.
    """

    def __init__(self, module: nn.Module, switch: ShardSwitch, plan: str, fix: str) -> None:
        self._switch = switch
        self._plan = plan
        self._fix = fix
        self._watched = [
            (parameter, self._watch(name, parameter))
            for name, parameter in module.named_parameters()
            if _can(parameter)
        ]
        self._call = module.register_forward_pre_hook(OwnHook(self._refuse_other_parameters, only_looks=True))

    def _watch(self, name: str, parameter: nn.Parameter) -> int:
        """Add the hook of a parameter, and return its number among the parameter's."""
        switch = self._switch

        def hook(_: torch.Tensor) -> None:  # called for each parameter in each backward, so it is short
            if switch.state != "plain" and switch.runs_users_code:
                self._refuse(name)

        if parameter.requires_grad:
            return parameter.register_hook(hook).id
        parameter.requires_grad_(True)  # torch registers hooks on trainable tensors only, and keeps them afterwards
        try:
            return parameter.register_hook(hook).id
        finally:
            parameter.requires_grad_(False)

    def _refuse_other_parameters(self, module: nn.Module, _: Any) -> None:
        """Refuse a call with trained tensors in the place of the parameters, as MAML's inner steps make by torch.func."""
        if not (torch.is_grad_enabled() and self._switch.runs_users_code):
            return
        for name, tensor in module.named_parameters():
            if type(tensor) is torch.Tensor and tensor.requires_grad:  # a parameter of its own has a class of its own
                raise ApplyError(
                    f"the module was called with another tensor in the place of its parameter '{name}' "
                    f"(torch.func.functional_call, as inner steps of MAML do) under the plan '{self._plan}': what trains that "
                    "tensor is of this rank's share of the batch alone, and nothing would exchange it",
                    fix="train such a model on one device (plan='single'), or compute the loss from outputs of model(...)",
                )

    def _refuse(self, name: str) -> NoReturn:
        raise ApplyError(
            f"a gradient of parameter '{name}' came from a backward of the script's own under the plan '{self._plan}': it is of "
            "this rank's share of the batch alone, and nothing would exchange it",
            fix=self._fix,
        )

    def put_aside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context of the engine's own work, whose backwards call no hook: one takes as long as a small operator.

        Hooks of a parameter that has others, too, stay.
        """
        return _Aside(self._watched)

    def close(self) -> None:
        """Remove the hooks."""
        for parameter, number in self._watched:
            hooks = parameter._backward_hooks
            if hooks is not None:
                hooks.pop(number, None)
        self._watched = []
        self._call.remove()


class _Aside:
    """A context in which parameters have no hook of ours."""

    __slots__ = ("_taken", "_watched")

    def __init__(self, watched: Sequence[tuple[nn.Parameter, int]]) -> None:
        self._watched = watched
        self._taken: list[tuple[nn.Parameter, dict[int, Any]]] = []

    def __enter__(self) -> None:
        for parameter, number in self._watched:
            hooks = parameter._backward_hooks
            if hooks is not None and len(hooks) == 1 and number in hooks:
                parameter._backward_hooks = None  # an empty table would be called, too
                self._taken.append((parameter, hooks))

    def __exit__(self, *_: object) -> None:
        while self._taken:
            parameter, hooks = self._taken.pop()
            newer = parameter._backward_hooks  # of the user's code, meanwhile
            if newer is None:
                parameter._backward_hooks = hooks
            else:
                newer.update(hooks)


def _can(parameter: nn.Parameter) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
