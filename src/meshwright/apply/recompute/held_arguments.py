"""Arguments of torch's checkpoint that torch 2.11 builds anew to find their devices, and thereby breaks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from meshwright.trees import LEAVES, tensors_in

__all__: list[str] = []

# It puts None in place of each tensor: a PackedSequence, and any class of arguments that looks at its parts, then raises.
_BUILDS_ANEW = torch.__version__ < "2.12"


class _Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def hold_arguments(run: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and arguments for torch's checkpoint; the same ones, but for torch 2.11 and containers.

    Empty tensors stand beside held containers, so that torch keeps the random states of their devices.
    """
    if not _BUILDS_ANEW or all(isinstance(arg, torch.Tensor) or type(arg) in LEAVES for arg in args):
        return run, args
    held = [arg if isinstance(arg, torch.Tensor) or type(arg) in LEAVES else _Held(arg) for arg in args]
    devices = {tensor.device for tensor in tensors_in([arg.value for arg in held if isinstance(arg, _Held)])}
    return functools.partial(_run_held, run, len(args)), (*held, *(torch.empty(0, device=each) for each in devices))


def _run_held(run: Callable[..., Any], num_args: int, *args: Any, **kwargs: Any) -> Any:
    return run(*(arg.value if isinstance(arg, _Held) else arg for arg in args[:num_args]), **kwargs)
