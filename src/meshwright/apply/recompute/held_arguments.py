"""Differences of torch's checkpoint before torch 2.13: containers as arguments, and errors of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from meshwright.trees import LEAVES, tensors_in

__all__: list[str] = []

# It puts None in place of each tensor: a PackedSequence, and any class of arguments that looks at its parts, then raises.
_BUILDS_ANEW = torch.__version__ < "2.12"


# An error of the forward leaves the hooks of saved tensors in force, until its frames are collected: in any thread.
_LEAVES_HOOKS = torch.__version__ < "2.13"


class _First:
    """A function whose first call gives its error to `raise_error`, so that the checkpoint around it ends as ever."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._has_run = False
        self._error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_run:
            return self._run(*args, **kwargs)
        self._has_run = True
        try:
            return self._run(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised by raise_error
            self._error = error
            return None

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def checkpoint_closed(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call torch's checkpoint, not reentrant; nothing of it stays in force where the function raises."""
    if not _LEAVES_HOOKS:
        return checkpoint(run, *args, use_reentrant=False, **options)
    first = _First(run)
    result = checkpoint(first, *args, use_reentrant=False, **options)
    first.raise_error()
    return result


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
