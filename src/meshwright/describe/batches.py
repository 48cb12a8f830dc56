"""The two forms of a batch: keyword arguments, or a pair of inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.errors import ApplyError
from meshwright.trees import split_sizes, tensors_in

if TYPE_CHECKING:
    from meshwright.run.parallel_model import ParallelModel

__all__: list[str] = ["split_sizes"]


def model_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a batch gives to the model.

    Args:
        batch: A mapping (keywords), or a pair ``(inputs, targets)`` whose inputs are a mapping (keywords), a tuple (positional)
            or one tensor. Another object is passed as it is.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    is_pair = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
    if is_pair and len(batch) != 2:
        raise ApplyError(
            f"a batch that is a {type(batch).__name__} must be a pair (inputs, targets), this one has {len(batch)} items",
            fix="put several inputs into a tuple of their own: ((ids, mask), labels)",
        )
    inputs = batch[0] if is_pair else batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}


def call_model(module: nn.Module, batch: Any) -> Any:
    """Return the module's outputs for a batch of either form."""
    args, kwargs = model_inputs(batch)
    return module(*args, **kwargs)


def count_tokens(batch: Any, num_samples: int) -> int:
    """Return the elements of the first integer input [count]; the samples where no input is integer.

    The first integer input of a token model holds its ids. Targets and labels are not looked at.
    """
    if batch is None:
        return 0
    for tensor in tensors_in(model_inputs(batch)):
        if tensor.dim() > 1 and not tensor.dtype.is_floating_point and tensor.dtype != torch.bool:
            return tensor.numel()
    return num_samples


def split_batch(global_batch: Any, model: ParallelModel) -> Any:
    """Return this rank's share of a global batch, or None where the batch has fewer samples than there are ranks.

    Shares are contiguous and differ by at most one sample, the larger ones first.

    Args:
        global_batch: The batch that all ranks share, the same on each.
        model: What `apply_plan` returned.
    """
    shares = model.splitter.cut(global_batch, model.dp_size)
    return shares[model.dp_rank] if model.dp_rank < len(shares) else None
