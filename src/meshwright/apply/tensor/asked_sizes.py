"""Whether code asks how large its tensors are: then what was proven for some sizes says nothing about others.

Followed are sizes that code compares, also after whole-number arithmetic (`x.shape[1] > 8`, `x.size(1) // 2 == 4`, `len(x) > 3`).
Comparisons inside torch itself are torch's checks. A size that becomes a float, or that `range` counts to, is not followed.
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

__all__: list[str] = []

_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.size}  # pyright: ignore[reportAttributeAccessIssue]
_NUMBERS = {torch.Tensor.numel, torch.Tensor.nelement, torch.numel}


class AskedSizes(TorchFunctionMode):
    """Notices, while code runs inside, that it asks for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False
        """Whether it has compared one."""

    def _compared(self, _is_same: bool, _is_plain: bool) -> None:
        if not is_torchs_own(sys._getframe(1)):
            self.any = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIZES:
            if isinstance(result, torch.Size):
                return torch.Size([Size(size, size, self._compared) for size in result])
            return Size(result, result, self._compared)
        if func in _NUMBERS:
            return Size(result, result, self._compared)
        if func is torch.Tensor.__len__ and not is_torchs_own(_caller(sys._getframe(1))):
            self.any = True  # an int by Python's own rule, which says nothing when it is compared
        return result


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called a method of torch.Tensor which is written in Python."""
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_tensor.py", "torch/overrides.py")):
        frame = frame.f_back
    return frame
