"""Whether code asks how large its tensors are: then what was proven for some sizes says nothing about others.

Followed are sizes that code compares, also after whole-number arithmetic (`x.shape[1] > 8`, `x.size(1) // 2 == 4`, `len(x) > 3`).
Comparisons inside torch itself are torch's checks, and a size that no argument has is the model's own (heads, their width). Not
followed are a size that becomes a float, and numbers that `range` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.types.marked import Size
from meshwright.apply.tensor.types.record import is_torchs_own
from meshwright.describe.tree import tensors_in

__all__: list[str] = []

_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.size}  # pyright: ignore[reportAttributeAccessIssue]
_NUMBERS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}


class AskedSizes(TorchFunctionMode):
    """Notices, while code runs inside, that it asks for sizes.

    Args:
        arguments: What the code is called with.
    """

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.any = False
        """Whether it has compared one."""
        self._given = {size for tensor in tensors_in(arguments) for size in tensor.shape}
        self._given |= {tensor.numel() for tensor in tensors_in(arguments)}

    def _followed(self, size: int) -> Size:
        def compared(_is_same: bool, _is_plain: bool) -> None:
            if size in self._given and not is_torchs_own(sys._getframe(1)):
                self.any = True

        return Size(size, size, compared)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIZES:
            if isinstance(result, torch.Size):
                return torch.Size([self._followed(size) for size in result])
            return self._followed(result)
        if func in _NUMBERS:
            return self._followed(result)
        if func is torch.Tensor.__len__ and not is_torchs_own(_caller(sys._getframe(1))):
            self.any = True  # an int by Python's own rule, which says nothing when it is compared
        return result


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called a method of torch.Tensor which is written in Python."""
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_tensor.py", "torch/overrides.py")):
        frame = frame.f_back
    return frame
