"""Backward in two halves: first the gradients of inputs, for which the previous stage waits, later those of weights.

Inside a `SplitBackward` a product with a parameter (linear layers, convolutions) defers its weight's gradient and keeps the
tensors needed for it. Other parameters (norms, tables, recurrent layers) get theirs in the first half: they are cheap, or come
with the input's gradient anyway. Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright._torch_private import LINEAR, run_backward, without_view

__all__: list[str] = []

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


Rest = Callable[[], list[tuple[Tensor, Tensor]]]
"""Computes weights' gradients: each weight, and its gradient."""


_TOGETHER_BYTES = 2**20
"""Gradients that autograd gets in one call: each call costs as much as a small product, and holds its gradients [bytes]."""


def run_rest(rest: list[Rest]) -> None:
    """Compute the deferred gradients and accumulate them into the weights, whose hooks run as in any backward."""
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    for place, work in enumerate(rest):
        for weight, gradient in work():
            weights.append(weight)
            gradients.append(gradient)
        is_last = place == len(rest) - 1
        if weights and (is_last or sum(gradient.nbytes for gradient in gradients) >= _TOGETHER_BYTES):
            torch.autograd.backward(weights, gradients)
            weights, gradients = [], []


class SplitBackward(TorchFunctionMode):
    """Defers the weight gradients of linear layers and convolutions inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self._rest: list[Rest] = []
        self._is_running = False

    def backward(self, roots: list[Tensor], gradients: list[Tensor]) -> list[Rest]:
        """Run the first half of a backward and return the second."""
        self._is_running = True
        try:
            with self:  # what is recomputed must be computed as it was
                run_backward(roots, gradients)
        finally:
            self._is_running = False
        rest, self._rest = self._rest, []
        return rest

    def put_off(self, work: Rest) -> None:
        """Defer a computation to the second half."""
        if self._is_running:  # else a layer wants a gradient in its forward, for one of its inputs
            self._rest.append(work)

    def _inner_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        was_running, self._is_running = self._is_running, False  # true where a forward is recomputed
        try:
            return torch.autograd.grad(*args, **kwargs)
        finally:
            self._is_running = was_running

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return self._inner_gradient(args, kwargs)
        if func is LINEAR or func is F.linear:
            x, weight, bias = _bound(args, kwargs, (None, None, None))
            if _can_wait(x, weight, bias):
                return _Linear.apply(x, (weight, bias), self)
        elif func in _CONVOLUTIONS:
            num = _CONVOLUTIONS[func]
            x, weight, bias, stride, padding, dilation, groups = _bound(args, kwargs, (None, None, None, 1, 0, 1, 1))
            if _can_wait(x, weight, bias) and not isinstance(padding, str) and x.dim() == num + 2:
                sizes = (_each(stride, num), _each(padding, num), _each(dilation, num))
                return _Convolution.apply(x, (weight, bias), (sizes, groups, self))
        return func(*args, **kwargs)


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any], defaults: tuple[Any, ...]) -> list[Any]:
    names = _ARGUMENTS[: len(defaults)]
    found = [kwargs.get(name, default) for name, default in zip(names, defaults, strict=True)]
    found[: len(args)] = args
    return found


def _each(value: Any, num: int) -> list[int]:
    return [int(value)] * num if isinstance(value, int) else [int(item) for item in value]


def _can_wait(x: Any, weight: Any, bias: Any) -> bool:
    """Tell whether the gradients can be deferred: they go to leaves, and something waits for the input's."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or not x.requires_grad:
        return False
    parameters = [weight] if bias is None else [weight, bias]
    return all(type(p) is torch.nn.Parameter and p.is_leaf for p in parameters) and weight.requires_grad


def _own(result: Tensor) -> Tensor:
    """Return a result that the model's code may write into; autograd refuses that for a view made by a Function."""
    return without_view(result, result.shape) if result._is_view() else result


def _rows(x: Tensor) -> Tensor:
    """Return x [..., n] as a matrix [rows, n]: n may be 0, on a rank whose shard of a layer holds no feature."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class _Linear(torch.autograd.Function):
    """y = x W^T + b: x [..., in], W [out, in], b [out].

    Autograd does not see W and b, which would get a gradient of None in the first half, and their hooks with it. They are not
    saved for backward either: what a checkpoint recomputes for a saved tensor is another tensor, and no parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: tuple[Tensor, Tensor | None], split: SplitBackward) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.split = parameters, split
        return _own(F.linear(x, *parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        rows = _rows(gradients[0])

        def rest() -> list[tuple[Tensor, Tensor]]:
            found = [(weight, rows.t().mm(_rows(x)))]
            if bias is not None and bias.requires_grad:
                found.append((bias, rows.sum(0)))
            return found

        ctx.split.put_off(rest)
        return rows.mm(weight).view(x.shape), None, None


class _Convolution(torch.autograd.Function):
    """A convolution of x [batch, in, ...] with W [out, in / groups, ...] and b [out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: tuple[Tensor, Tensor | None], settings: Any) -> Tensor:
        weight, bias = parameters
        ctx.save_for_backward(x)
        ctx.parameters = parameters
        ctx.sizes, ctx.groups, ctx.split = settings
        sizes, groups = ctx.sizes, ctx.groups
        stride, padding, dilation = sizes
        return _own(torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        groups = ctx.groups
        stride, padding, dilation = ctx.sizes
        trains_bias = bias is not None and bias.requires_grad

        def part(mask: list[bool]) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(
                gradient,
                x,
                weight,
                list(bias.shape) if bias is not None and trains_bias else None,
                stride,
                padding,
                dilation,
                False,
                [0] * len(stride),
                groups,
                mask,
            )

        def rest() -> list[tuple[Tensor, Tensor]]:
            _, of_weight, of_bias = part([False, True, trains_bias])
            pairs = ((weight, of_weight), (bias, of_bias))
            return [(owner, found) for owner, found in pairs if found is not None and owner is not None]

        ctx.split.put_off(rest)
        return part([True, False, False])[0], None, None
