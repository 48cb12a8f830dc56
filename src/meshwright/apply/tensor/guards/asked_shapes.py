"""Runs of a call that compute shapes alone: an image with twice as many rows costs four times the work of the call itself.

The same code runs on tensors without numbers. Where it reads a number, or takes a tensor that has some, it raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import copy_module, map_call
from meshwright.trees import tensors_in

__all__: list[str] = []

_WORTH = 2**15
"""Entries of a call's tensors from which shapes alone cost less: a function takes some 0.1 ms more without numbers [count]."""


def are_worth_it(inputs: Any) -> bool:
    """Tell whether tensors are so large that a run that computes shapes alone costs less."""
    return sum(tensor.numel() for tensor in tensors_in(inputs)) >= _WORTH


def without_numbers(module: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Return a copy of a module, and of its arguments, whose tensors have shapes and no numbers.

    Raises:
        ApplyError: An attribute of the module cannot be copied.
    """
    return copy_module(module, _empty), map_call(inputs, _empty)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
