"""The one place that imports names of torch that are not documented as public. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import _engine_run_backward
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DEAR_OPERATORS",
    "LINEAR",
    "TURNS",
    "Convolution",
    "FakeTensor",
    "FakeTensorError",
    "FakeTensorMode",
    "ProcessGroupGloo",
    "TorchDispatchMode",
    "cpu_backend",
    "cpu_backend_name",
    "current_function_mode",
    "foreach_add_",
    "foreach_mul_",
    "foreach_norm",
    "run_backward",
    "without_checkpoints",
    "without_dispatch_modes",
    "without_function_modes",
    "without_function_subclasses",
]

Convolution = torch.nn.modules.conv._ConvNd  # pyright: ignore[reportPrivateImportUsage]
"""The base of torch's convolution layers."""

FakeTensorError = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What is raised where a fake tensor, which has a shape and no values, does not suffice."""

without_function_modes = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
without_function_subclasses = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
"""Contexts in which no TorchFunctionMode, and no tensor subclass's own `__torch_function__`, sees what is done."""

# What a TorchFunctionMode is told is not the function that was called, but what that one calls.
LINEAR = torch._C._nn.linear  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
TURNS = frozenset(
    {
        torch.t,
        torch.Tensor.t,
        torch.Tensor.T.__get__,  # pyright: ignore[reportAttributeAccessIssue]
        torch.Tensor.mT.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    }
)
"""What swaps the last two dims."""

without_dispatch_modes = _disable_current_modes
"""Context in which no TorchDispatchMode sees what is done: selective recompute counts the operators of a layer."""

# One call for a list of tensors; torch's own optimizers and clipping are written with them.
foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

_ATEN = torch.ops.aten
DEAR_OPERATORS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""Matrix products, convolutions and attention: what selective recompute does not do twice."""


def run_backward(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Do what torch.autograd.backward does, with every TorchFunctionMode in force: that one takes them off meanwhile."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def without_checkpoints(is_inside: Callable[[bool], None]) -> Iterator[None]:
    """Have torch.utils.checkpoint call its function plainly; `is_inside` is told when it enters and when it leaves one."""
    theirs = torch.utils.checkpoint
    kept = theirs._checkpoint_without_reentrant_generator, theirs.CheckpointFunction

    def generator(*_: Any, **__: Any) -> Generator[None]:
        is_inside(True)
        try:
            yield
        finally:
            is_inside(False)

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            is_inside(True)
            try:
                return function(*args)
            finally:
                is_inside(False)

    theirs._checkpoint_without_reentrant_generator = generator
    theirs.CheckpointFunction = Plain  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        theirs._checkpoint_without_reentrant_generator, theirs.CheckpointFunction = kept


def cpu_backend_name(group: ProcessGroup) -> str:
    """Return what exchanges a group's CPU tensors: "gloo", "shm"; "" where nothing does."""
    backend = cpu_backend(group)
    return "" if backend is None else backend.name()


def cpu_backend(group: ProcessGroup) -> Any:
    """Return the object that exchanges a group's CPU tensors; None where nothing does."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
