"""Names of torch functions that give the same on parts of tensors as on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__: list[str] = []


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name; of a property "grad.get" or "grad.set"."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name.strip('_')}"  # pyright: ignore
    return name


def plain_name(name: str) -> str:
    """Return the name of the function behind an operator or an in-place variant.

    >>> [plain_name(name) for name in ("add_", "__iadd__", "__radd__", "_foreach_add_", "__setitem__", "rsub")]
    ['add', 'add', 'add', 'add', 'setitem', 'rsub']
    """
    name = name.removeprefix("_foreach_")
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        return inner[1:] if inner[1:] in OPERATORS and inner not in OPERATORS else inner
    return name.rstrip("_")


def writes_in_place(name: str) -> bool:
    """Tell whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        inner = name.strip("_")
        return inner == "setitem" or (inner[:1] == "i" and inner[1:] in OPERATORS and inner not in OPERATORS)
    return name.endswith("_")


OPERATORS = _names(
    "add sub mul div truediv floordiv mod pow neg pos abs invert and or xor eq ne lt le gt ge lshift rshift"
)

ELEMENTWISE = OPERATORS | _names("""
    rsub subtract multiply divide true_divide floor_divide remainder fmod float_power negative positive absolute sign sgn
    signbit sqrt rsqrt square reciprocal exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan atan2 arctan2 sinh
    cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv relu relu6 gelu silu mish softplus softsign hardtanh hardswish
    leaky_relu elu selu celu logsigmoid clamp clamp_min clamp_max clip threshold lerp addcmul addcdiv maximum minimum fmax
    fmin hypot copysign ldexp masked_fill nan_to_num isnan isinf isfinite isposinf isneginf isclose not_equal less
    less_equal greater greater_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
    bitwise_not round floor ceil trunc frac fix clone contiguous detach to type type_as float double half bfloat16 int long
    bool cpu cuda copy fill zero zeros_like ones_like full_like empty_like where real xlogy
    """)

COPIES = _names("clone contiguous detach")
"""Give their argument's values, in its dtype."""

MAPS = _names("clone contiguous detach to type float double half bfloat16 zeros_like zero")
"""Linear whatever else they are given."""

MAPS_OF_WHOLE = _names("""
    sum mean view reshape flatten t transpose permute squeeze unsqueeze expand expand_as view_as narrow select chunk split
    getitem movedim matmul mm mv
    """)
"""Linear functions of a whole tensor that mix its entries."""

LOOKS = _names("isnan isinf isfinite")

VIEWS_OF_VALUES = frozenset(("grad.get", "data.get", "T.get", "mT.get", "H.get", "mH.get", "real.get", "imag.get"))
"""Properties that give values; every other one is a fact of the tensor."""

FACTS = _names("""
    size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex
    is_signed is_conj is_neg is_inference is_shared is_pinned is_same_size is_set_to get_device data_ptr untyped_storage
    storage storage_type _storage _typed_storage __len__ __hash__ __repr__ requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad __format__ new_empty new_zeros new_ones new_full new_tensor new
    _is_view is_tensor is_nonzero_ share_memory_ _has_compatible_shallow_copy_type result_type __dir__ is_same_size is_storage
    backward is_coalesced dense_dim sparse_dim _is_zerotensor has_names is_distributed
    """)
"""Functions that tell of a tensor or register something with it; none gives its values."""
