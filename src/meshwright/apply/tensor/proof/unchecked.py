"""Checks for kernels that read past the end of a tensor, or end the process, when shapes do not match.

A proof tries wrong layouts, too. Those must end in an exception, not in a read of foreign memory or a signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright._torch_private import WEIGHT_NORM

__all__: list[str] = []


def check_shapes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError where a call would read outside its tensors, and RuntimeError where it would divide by zero heads."""
    check = _CHECKS.get(func)
    if check is not None:
        check(args, kwargs)


# torch 2.11 divides the number of heads by that of key heads before it looks whether there are any: SIGFPE. 2.12 looks first.
_DIVIDES_BY_HEADS = torch.__version__ < "2.12"


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The kernel assumes as many values as keys.
    key, value = _given(args, kwargs, 1, "key"), _given(args, kwargs, 2, "value")
    if key.dim() < 2 or value.dim() < 2 or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention over {list(key.shape)} keys and {list(value.shape)} values")
    if _DIVIDES_BY_HEADS and 0 in (*key.shape[-3:-2], *value.shape[-3:-2]):
        raise RuntimeError(
            f"attention over {list(key.shape)} keys, which have no heads"
        )  # the type that other counts raise


def _weight_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The kernel for the first and the last dim reads as many magnitudes as there are rows; others broadcast.
    v, g = _given(args, kwargs, 0, "v"), _given(args, kwargs, 1, "g")
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if dim in (0, v.dim() - 1) and g.numel() != v.shape[dim]:
        raise ValueError(f"a weight norm of {v.shape[dim]} rows with {g.numel()} magnitudes")


def _ctc_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Labels are used as class indices without a check.
    log_probs, targets = _given(args, kwargs, 0, "log_probs"), _given(args, kwargs, 1, "targets")
    if targets.numel() and int(targets.max()) >= log_probs.shape[-1]:
        raise ValueError(f"a CTC loss of label {int(targets.max())} among {log_probs.shape[-1]} classes")


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Tensor:
    return args[place] if len(args) > place else kwargs[name]


_CHECKS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], None]] = {
    F.scaled_dot_product_attention: _attention,
    WEIGHT_NORM: _weight_norm,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}
