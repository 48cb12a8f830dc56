"""Torch functions called between layers: those that only read metadata, and those that write into an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.apply.pipeline.walking.stand_ins import StageValue, value_of, values_in
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []

_METHODS = """
    dim size stride numel nelement element_size ndimension is_floating_point is_complex is_contiguous is_signed storage_offset
    get_device is_inference __len__ __hash__ __repr__ __format__ requires_grad_ register_hook
    """
_PROPERTIES = """
    shape dtype device ndim requires_grad layout is_cuda is_cpu is_meta is_sparse is_nested is_quantized is_mkldnn is_leaf
    itemsize nbytes output_nr _version
    """
METADATA = frozenset(
    {
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What a tensor tells without its values: nothing is exchanged for it."""


def shown_name(func: Callable[..., Any]) -> str:
    """Return a torch function as code calls it: `stack()`, or `.grad_fn` for a property."""
    name = getattr(func, "__name__", str(func))
    return f".{getattr(func, '__self__', func).__name__}" if name == "__get__" else f"{name}()"


_AUGMENTED = frozenset(
    f"__{name}__"
    for name in (
        "setitem",
        "set",
        *(f"i{kind}" for kind in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")),
        *(f"i{kind}" for kind in ("and", "or", "xor", "lshift", "rshift")),
    )
)


def writes_to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a function writes into; None where it only makes new ones."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    is_in_place = (
        name in _AUGMENTED or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    )
    if is_in_place and args and isinstance(args[0], Tensor):
        return args[0]
    return None


RANDOM = frozenset(
    {
        *(
            getattr(torch, name)
            for name in ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson")
        ),
        *(getattr(torch, f"{name}_like") for name in ("rand", "randn", "randint")),
        *(
            getattr(F, name)
            for name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax")
        ),
        *(getattr(F, f"dropout{dims}d") for dims in (1, 2, 3)),
        *(
            getattr(Tensor, f"{name}_")
            for name in ("uniform", "normal", "bernoulli", "exponential", "random", "cauchy", "log_normal", "geometric")
        ),
        Tensor.bernoulli,
        Tensor.multinomial,
    }
)
"""What draws random numbers."""

_MAY_BE_OFF: dict[Any, tuple[float, bool]] = {
    F.dropout: (0.5, True),
    **{getattr(F, f"dropout{dims}d"): (0.5, True) for dims in (1, 2, 3)},
    F.alpha_dropout: (0.5, False),
    F.feature_alpha_dropout: (0.5, False),
}
"""Kinds of dropout, with their defaults of probability and mode."""


def may_draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call draws a tensor of random numbers: dropout draws none in eval mode, and none at the probability 0."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func not in RANDOM:
        return False
    if func in _MAY_BE_OFF:
        p, training = _MAY_BE_OFF[func]
        is_on = kwargs.get("training", args[2] if len(args) > 2 else training)
        return bool(is_on and kwargs.get("p", args[1] if len(args) > 1 else p))
    return func is not F.rrelu or bool(kwargs.get("training", args[3] if len(args) > 3 else False))


def is_of_packs(func: Callable[..., Any]) -> bool:
    """Tell whether a function's second result, sizes or lengths, comes of the arguments behind the first one alone."""
    return getattr(func, "__name__", "") in ("_pack_padded_sequence", "_pad_packed_sequence")


DIFFERENTIATES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""What runs a backward inside of the forward."""


def refuse_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a backward in the code between layers, unless everything it runs through is on one stage.

    Raises:
        ApplyError: It would run through several stages.
    """
    found = differentiated_by(func, args, kwargs)
    homes = {value.home for value in values_in(args[0] if args else kwargs)}
    if len(homes) == 1 and found:
        (home,) = homes
        if all(value is not None and value.home == home for value in found):
            return
    raise gradient_refusal(func)


def differentiated_by(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[StageValue | None]:
    """Return what is known of the tensors that torch.autograd.grad differentiates by; nothing for another function."""
    if func is not torch.autograd.grad:
        return []
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
    return [value_of(tensor) for tensor in tensors_in(inputs)]


def gradient_refusal(func: Callable[..., Any]) -> ApplyError:
    """Return the error for a backward in the code between layers."""
    return ApplyError(
        f"the code between the layers calls {getattr(func, '__name__', func)}() (a gradient penalty, or an inner step of "
        "training): that backward would run through layers of several stages",
        fix="call it inside of one layer, or use pp=1 (dp, zero and tp take it)",
    )
