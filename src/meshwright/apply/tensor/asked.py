"""What code asks of its tensors beside computing with them: then a proof says nothing about other sizes, or other numbers.

Followed are sizes that code compares, also after whole-number arithmetic (`x.shape[1] > 8`, `x.size(1) // 2 == 4`, `len(x) > 3`).
Comparisons inside torch itself are torch's checks, and a size that no argument has is the model's own (heads, their width). Not
followed are a size that becomes a float, and numbers that `range` gives.

Numbers are followed that code reads (`item()`, `bool()`, `int()`) of arguments that need no gradient and of buffers, and of what
is computed of those alone: a flag, a counter, a mask's `all()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.types.marked import Size
from meshwright.apply.tensor.types.record import is_torchs_own
from meshwright.describe.tree import tensors_in

__all__: list[str] = []

_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.size}  # pyright: ignore[reportAttributeAccessIssue]
_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.__format__,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
_NUMBERS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}


class Asked(TorchFunctionMode):
    """Notices, while code runs inside, what it asks for.

    Args:
        module: The module that runs.
        arguments: What it is called with.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.sizes = False
        """Whether it has compared a size."""
        self.values = False
        """Whether it has read a number of an argument or a buffer."""
        self.is_same = True
        """Whether it gave the same as where gradients are on."""
        self._given = {size for tensor in tensors_in(arguments) for size in tensor.shape}
        self._given |= {tensor.numel() for tensor in tensors_in(arguments)}
        kept = [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
        plain = [tensor for tensor in tensors_in(arguments) if not tensor.requires_grad]
        self._alive = [*plain, *kept, *module.buffers()]
        self._followed_ids = {id(tensor) for tensor in self._alive}

    def _followed(self, size: int) -> Size:
        def compared(_is_same: bool, _is_plain: bool) -> None:
            if size in self._given and not is_torchs_own(sys._getframe(1)):
                self.sizes = True

        return Size(size, size, compared)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and args and id(args[0]) in self._followed_ids:
            self.values = True
        result = func(*args, **kwargs)
        if func in _SIZES:
            if isinstance(result, torch.Size):
                return torch.Size([self._followed(size) for size in result])
            return self._followed(result)
        if func in _NUMBERS:
            return self._followed(result)
        if func is torch.Tensor.__len__ and not is_torchs_own(_caller(sys._getframe(1))):
            self.sizes = True  # an int by Python's own rule, which says nothing when it is compared
        self._follow(args, kwargs, result)
        return result

    def _follow(self, args: Any, kwargs: Any, result: Any) -> None:
        """Follow what is computed of followed tensors alone."""
        given = list(tensors_in((args, kwargs)))
        if given and all(id(tensor) in self._followed_ids for tensor in given):
            for tensor in tensors_in(result):
                self._alive.append(tensor)  # an id is only worth something while its tensor lives
                self._followed_ids.add(id(tensor))


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called a method of torch.Tensor which is written in Python."""
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_tensor.py", "torch/overrides.py")):
        frame = frame.f_back
    return frame
