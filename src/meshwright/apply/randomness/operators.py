"""Torch operators that draw random numbers, replaced while a step draws by place: dropout of every kind ends in one of these.

They are replaced below Python functions and composite operators (dropout inside of attention and recurrences, Gumbel softmax,
`rand_like`, `randn`), and only inside `sites.in_step`. What cannot be drawn by place (gamma, Poisson, fused attention of a GPU)
runs as torch's own, and is told. A call with a generator of its own is the user's own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshwright._torch_dispatch import draws_untouched, is_fake_mode_on, is_transformed, replace_draws, run_once
from meshwright._torch_private import FakeTensor
from meshwright.apply.randomness import distributions
from meshwright.apply.randomness.dropouts import dropout, dropout_in_place, native_dropout
from meshwright.apply.randomness.philox import ElementPlace, shape_of
from meshwright.apply.randomness.recurrences import bernoulli_of_pack, layers_of_gpu, recurrence, running_pack
from meshwright.apply.randomness.sites import place_of_draw, running_forward, tell_own

__all__: list[str] = []

Kernel = Callable[..., Any]

_aten = torch.ops.aten
_PLAIN: Final = (Tensor, nn.Parameter)
_OWN: Final = (
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "normal_functional",
    "randperm.generator_out",
    "rrelu_with_noise.out",
    "rrelu_with_noise_functional",
)
"""What is left to torch."""
_EXACT: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of whole numbers that a floating dtype holds exactly."""


@run_once
def install_operators() -> None:
    """Replace the operators, once in this process; outside of `sites.in_step` torch's own run, at no cost."""
    kernels = {name: functools.partial(_guarded, name, kernel) for name, kernel in _KERNELS.items()}
    kernels |= {name: functools.partial(_left_to_torch, name) for name in _OWN}
    replace_draws(kernels)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


def _as_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    with draws_untouched():
        return _operator(name)(*args, **kwargs)


def _guarded(name: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Run a replaced operator, or torch's own where the call has a generator, or a tensor without plain memory."""
    if is_fake_mode_on():  # a trace, of torch.compile for example
        return _as_torch(name, *args, **kwargs)
    if is_transformed():
        tell_own(f"{name} inside of torch.func")
        return _as_torch(name, *args, **kwargs)
    if kwargs.get("generator") is not None:
        tell_own(f"{name} and a generator of its own")
        return _as_torch(name, *args, **kwargs)
    for value in args:
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, FakeTensor) or value.is_meta:
            return _as_torch(name, *args, **kwargs)
        if type(value) not in _PLAIN or value.layout != torch.strided:
            tell_own(f"{name} of a {type(value).__name__}")
            return _as_torch(name, *args, **kwargs)
    kwargs.pop("generator", None)
    result = kernel(*args, **kwargs)
    if result is NotImplemented:
        return _as_torch(name, *args, **kwargs)
    forward = running_forward()
    if forward is not None and forward.probes is not None:
        forward.probes.add(result)
    return result


def _left_to_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    drops = any(isinstance(value, float) and value > 0 for value in args) or kwargs.get("dropout_p", 0.0) > 0
    if drops or "attention" not in name:
        tell_own(name)
    return _as_torch(name, *args, **kwargs)


# -- filling a tensor -----------------------------------------------------------------------------------------------------


def _fill(out: Tensor, kind: str, make: Callable[[ElementPlace], Tensor]) -> Any:
    """Copy numbers into a tensor, made for its places; NotImplemented where the draw is torch's own."""
    place = place_of_draw(shape_of(out), kind)
    if place is None:
        return NotImplemented
    with torch.no_grad():
        made = make(place).view(out.shape)
    return _write(out, made)


def _write(out: Tensor, made: Tensor) -> Tensor:
    """Copy numbers into a tensor: autograd sees it, so that a leaf that requires gradients refuses, as in torch."""
    return out.copy_(made.to(out.dtype) if out.is_complex() else made)


def _write_parts(out: Tensor, fill: Kernel, *numbers: float) -> Any:
    """Draw the real and the imaginary parts of a complex tensor."""
    parts = fill(torch.empty((*out.shape, 2), dtype=out.dtype.to_real(), device=out.device), *numbers)
    return parts if parts is NotImplemented else _write(out, torch.view_as_complex(parts))


def _with_graph(name: str, given: Sequence[Any], made: Any) -> Any:
    """Return numbers with torch's graph, which gives tensors among these arguments zeros as gradients."""
    has_graph = any(isinstance(value, Tensor) and value.requires_grad for value in given)
    if made is NotImplemented or not (has_graph and torch.is_grad_enabled()):
        return made
    result = _as_torch(name, *given)
    result.detach().copy_(made)
    return result


def _bernoulli(out: Tensor, p: float = 0.5) -> Any:
    packed = running_pack(out) if 0 <= p <= 1 else None
    if packed is not None:
        return bernoulli_of_pack(out, p, packed)
    place = place_of_draw(shape_of(out), "bernoulli_") if 0 <= p <= 1 else None
    if place is None:
        return NotImplemented
    if out.is_contiguous() and not out.is_complex() and not (out.requires_grad and torch.is_grad_enabled()):
        distributions.fill_bernoulli(out.detach(), place, p)
        increment_version(out)  # native code writes unseen
        return out
    made = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    distributions.fill_bernoulli(made, place, p)
    return _write(out, made)


def _bernoulli_of(out: Tensor, p: Tensor) -> Any:
    if p.device.type == "cpu" and not bool(((p >= 0) & (p <= 1)).all()):
        return NotImplemented  # torch's own error
    return _fill(
        out, "bernoulli_", lambda place: distributions.uniform(place, torch.float64, out.device).view(out.shape) < p
    )


def _uniform(out: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if not low <= high:
        return NotImplemented  # torch's own error
    if out.is_complex():
        return _write_parts(out, _uniform, low, high)
    dtype = out.dtype if out.dtype in _EXACT else torch.float64

    def make(place: ElementPlace) -> Tensor:
        numbers = distributions.uniform(place, dtype, out.device)
        return numbers if (low, high) == (0.0, 1.0) else numbers * (high - low) + low

    return _fill(out, "uniform_", make)


def _normal(out: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    if not std >= 0:
        return NotImplemented  # torch's own error
    if out.is_complex():  # a variance of std ** 2, half of it in each part
        parts = _write_parts(out, _normal, 0.0, std * 0.5**0.5)
        return parts if parts is NotImplemented or not mean else out.add_(mean)
    return _fill(out, "normal_", lambda place: distributions.normal(place, out.device) * std + mean)


def _exponential(out: Tensor, lambd: float = 1.0) -> Any:
    if not lambd > 0:
        return NotImplemented
    return _fill(out, "exponential_", lambda place: distributions.exponential(place, out.device) / lambd)


def _geometric(out: Tensor, p: float) -> Any:
    if not 0 < p < 1:
        return NotImplemented
    scale = float(torch.log1p(torch.tensor(-p, dtype=torch.float64)))
    return _fill(
        out, "geometric_", lambda place: (distributions.exponential(place, out.device) / -scale).ceil().clamp(min=1)
    )


def _cauchy(out: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    if not sigma > 0:
        return NotImplemented

    def make(place: ElementPlace) -> Tensor:
        return median + sigma * (torch.pi * (distributions.uniform_open(place, out.device) - 0.5)).tan()

    return _fill(out, "cauchy_", make)


def _log_normal(out: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    if not std > 0:
        return NotImplemented
    return _fill(out, "log_normal_", lambda place: (distributions.normal(place, out.device) * std + mean).exp())


def _random(out: Tensor) -> Any:
    dtype = out.dtype
    if dtype in _EXACT:
        high = 2 ** _EXACT[dtype] + 1
    else:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return _integers(out, 0, high)


def _random_from(out: Tensor, low: int, high: int | None) -> Any:
    if high is None or not low < high:
        return NotImplemented
    return _integers(out, low, high)


def _random_to(out: Tensor, high: int) -> Any:
    return _integers(out, 0, high) if high > 0 else NotImplemented


def _integers(out: Tensor, low: int, high: int) -> Any:
    return _fill(out, "random_", lambda place: distributions.integers(place, low, high, out.device))


# -- results of their own --------------------------------------------------------------------------------------------------


def _rrelu(tensor: Tensor, noise: Tensor, *numbers: Any) -> Any:
    lower, upper, training = (*numbers, *(1 / 8, 1 / 3, False)[len(numbers) :])[:3]
    if not training:
        return NotImplemented
    drawn = _uniform(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), float(lower), float(upper))
    if drawn is NotImplemented:
        return NotImplemented
    noise.copy_(torch.where(tensor.detach() <= 0, drawn, torch.ones_like(drawn)))
    return tensor * noise


def _rrelu_in_place(tensor: Tensor, *given: Any) -> Any:
    return made if (made := _rrelu(tensor.clone(), *given)) is NotImplemented else tensor.copy_(made)


def _normal_of(mean: Any, std: Any = 1.0) -> Any:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    with torch.no_grad():
        like = torch.broadcast_tensors(*tensors)[0]
        drawn = _normal(torch.empty(like.shape, dtype=like.dtype, device=like.device))
        if drawn is not NotImplemented:
            drawn = drawn * std + mean
    kind = "_".join("Tensor" if isinstance(value, Tensor) else "float" for value in (mean, std))
    return _with_graph(f"normal.{kind}", (mean, std), drawn)


def _randperm(n: int, **options: Any) -> Any:
    device = torch.device(options.get("device") or "cpu")
    place = place_of_draw((int(n),), "randperm")
    if place is None or options.get("layout") not in (None, torch.strided):
        return NotImplemented
    numbers = distributions.integers(place, 0, 2**63 - 1, device)
    return numbers.argsort(stable=True).to(options.get("dtype") or torch.int64)


def _multinomial(weights: Tensor, num_samples: int, replacement: bool = False) -> Any:
    drawn = (*shape_of(weights)[:-1], int(num_samples)) if replacement else shape_of(weights)
    place = place_of_draw(drawn, "multinomial")
    if place is None:
        return NotImplemented
    given = weights.detach().double()
    if bool((given < 0).any()) or not bool(given.isfinite().all()) or bool((given.sum(-1) <= 0).any()):
        return NotImplemented  # torch's own error
    if not replacement and bool(((given > 0).sum(-1) < num_samples).any()):
        return NotImplemented  # torch's own way with too few of them
    if not replacement:  # whose exponential clock rings first; as torch does it
        clocks = given / distributions.exponential(place, weights.device).view(drawn)
        return clocks.topk(int(num_samples), dim=-1).indices
    numbers = distributions.uniform(place, torch.float64, weights.device).view(drawn)
    sums = given.cumsum(-1)
    found = torch.searchsorted(sums, numbers * sums[..., -1:], right=True)
    return found.clamp(max=weights.shape[-1] - 1)


# -- factories: inside of a mode of Python (selective recompute), what they would call is not seen --------------------------


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and name != "generator"}


def _made(fill: Kernel, *numbers: float) -> Kernel:
    def kernel(size: Sequence[int], **options: Any) -> Any:
        return fill(torch.empty(size, **_options(options)), *numbers)

    return kernel


def _made_like(fill: Kernel, *numbers: float) -> Kernel:
    def kernel(like: Tensor, **options: Any) -> Any:
        return fill(torch.empty_like(like, **_options(options), requires_grad=False), *numbers)

    return kernel


def _randint(high: int, size: Sequence[int], **options: Any) -> Any:
    return _randint_from(0, high, size, **options)


def _randint_from(low: int, high: int, size: Sequence[int], **options: Any) -> Any:
    made: dict[str, Any] = {"dtype": torch.int64} | _options(options)
    return _random_from(torch.empty(size, **made), low, high)


def _randint_like(like: Tensor, high: int, **options: Any) -> Any:
    return _random_from(torch.empty_like(like, **_options(options)), 0, high)


def _randint_like_from(like: Tensor, low: int, high: int, **options: Any) -> Any:
    return _random_from(torch.empty_like(like, **_options(options)), low, high)


def _bernoulli_made(p: Tensor) -> Any:
    return _with_graph("bernoulli", (p,), _bernoulli_of(torch.empty_like(p, requires_grad=False), p.detach()))


def _bernoulli_with(like: Tensor, p: float) -> Any:
    return _bernoulli(torch.empty_like(like, requires_grad=False), p)


def _normal_made(mean: float, std: float, size: Sequence[int], **options: Any) -> Any:
    return _normal(torch.empty(size, **_options(options)), mean, std)


def _into(kernel: Kernel) -> Kernel:
    """Return a kernel that writes the result of another into `out`, as torch's variants of operators do."""

    def write(*args: Any, out: Tensor, **options: Any) -> Any:
        made = kernel(*args, **options)
        return made if made is NotImplemented else out.resize_(made.shape).copy_(made)

    return write


_KERNELS: Final[dict[str, Kernel]] = {
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli_of,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "cauchy_": _cauchy,
    "log_normal_": _log_normal,
    "random_": _random,
    "random_.from": _random_from,
    "random_.to": _random_to,
    "native_dropout": functools.partial(native_dropout, _bernoulli),
    "dropout": functools.partial(dropout, _bernoulli),
    "dropout_": functools.partial(dropout_in_place, _bernoulli),
    "_cudnn_rnn": functools.partial(recurrence, layers_of_gpu),
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu_in_place,
    "normal.Tensor_float": _normal_of,
    "normal.float_Tensor": _normal_of,
    "normal.Tensor_Tensor": _normal_of,
    "normal.float_float": _normal_made,
    "rand": _made(_uniform),
    "rand_like": _made_like(_uniform),
    "randn": _made(_normal),
    "randn_like": _made_like(_normal),
    "randint": _randint,
    "randint.low": _randint_from,
    "randint_like": _randint_like,
    "randint_like.low_dtype": _randint_like_from,
    "bernoulli": _bernoulli_made,
    "bernoulli.p": _bernoulli_with,
    "randperm": _randperm,
    "multinomial": _multinomial,
    "bernoulli.out": _into(_bernoulli_made),
    "normal.Tensor_float_out": _into(_normal_of),
    "normal.float_Tensor_out": _into(_normal_of),
    "normal.Tensor_Tensor_out": _into(_normal_of),
    "randperm.out": _into(_randperm),
    "multinomial.out": _into(_multinomial),
}
