"""Autocast to bfloat16 of a described forward: that of CPUs, or that of CUDA devices, which casts other operators.

Fake tensors lie on the CPU, where models that make tensors of their own work too. So torch's autocast of CPUs runs, and for CUDA
the operators that only its lists have are cast by kernels of this module, as long as the description runs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.library
from torch import Tensor

from meshwright.spec.model import Autocast
from meshwright.trees import map_tensors

__all__: list[str] = []

_IN_FLOAT32: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim",
    "cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Operators whose inputs CUDA's autocast casts to float32, and that of CPUs leaves as they are.
Source: torch's documentation, "Automatic Mixed Precision package", "CUDA Ops that can autocast to float32"; the names are those
for which torch 2.13 has a kernel of AutocastCUDA and none of AutocastCPU."""

_WITH_DTYPE: Final = (
    "softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
)  # fmt: skip
"""Those that it asks for results in float32, where no dtype is given. Source: as above."""

_IN_BFLOAT16: Final = ("mv", "addmv", "addr", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
"""Those that it casts to bfloat16. Source: as above, "CUDA Ops that can autocast to float16"."""

_IN_THE_WIDEST: Final = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "vdot")
"""Those whose inputs it casts to the widest dtype among them. Source: as above, "CUDA Ops that promote to the widest input
type"."""


@contextlib.contextmanager
def under_autocast(kind: Autocast) -> Iterator[None]:
    """Run a forward on CPU tensors as under the autocast to bfloat16 of a kind of device.

    Kernels are registered for the whole process meanwhile: other threads must not run under the CPU's autocast then.

    Args:
        kind: "cuda", "cpu", or "none" for the model's own dtypes.
    """
    if kind == "none":
        yield
        return
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(_registered(_kernels()))
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        yield


@contextlib.contextmanager
def _registered(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    with warnings.catch_warnings():
        # Where another release of torch has a kernel of its own, ours stands before it for a while.
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel)
    try:
        yield
    finally:
        del library  # which takes its kernels back


def _kernels() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {}
    for names, make in (
        (_IN_FLOAT32, _casting(torch.float32)),
        (_IN_BFLOAT16, _casting(torch.bfloat16)),
        (_IN_THE_WIDEST, _promoting),
        (_WITH_DTYPE, _asking),
    ):
        for name in names:
            operator = _operator(name)
            if operator is not None:
                made[name] = make(operator)
    return made


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)  # an older torch has fewer
    return None if found is None else getattr(found, overload or "default", None)


def _without_autocast(operator: Any, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return operator(*args, **kwargs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    # Doubles and whole numbers stay as they are.
    return map_tensors(values, lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor)


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _casting(dtype: torch.dtype) -> Callable[[Any], Callable[..., Any]]:
    def make(operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return _without_autocast(operator, _cast(args, dtype), _cast(kwargs, dtype))

        return kernel

    return make


def _promoting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        found: set[torch.dtype] = set()
        map_tensors((args, kwargs), lambda tensor: found.add(tensor.dtype) or tensor)
        dtype = torch.float32 if torch.float32 in found else torch.bfloat16
        return _without_autocast(operator, _cast(args, dtype), _cast(kwargs, dtype))

    return kernel


def _asking(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is None and isinstance(args[0], Tensor) and _is_eligible(args[0]):
            place = _place_of_dtype(operator)
            if place >= len(args):  # not given by its place
                kwargs = {**kwargs, "dtype": torch.float32}
            elif args[place] is None:
                args = (*args[:place], torch.float32, *args[place + 1 :])
        return _without_autocast(operator, args, kwargs)

    return kernel


def _place_of_dtype(operator: Any) -> int:
    return next(place for place, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
