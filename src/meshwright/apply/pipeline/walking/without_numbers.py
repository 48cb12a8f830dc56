"""Code that takes tensors of other stages, run on fake tensors, or on values made up where it needs some: zeros first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright._torch_private import FakeTensorError
from meshwright.apply.pipeline.walking.stand_ins import FAKE_MODE, Meta, make_fake, replace_tensors, value_of
from meshwright.apply.randomness.sites import in_step
from meshwright.errors import ApplyError, MeshwrightError
from meshwright.trees import tensors_in

__all__: list[str] = []

_T = TypeVar("_T")


class ReadsValueError(ApplyError):
    """Code between the layers reads a value that another stage computes."""


class NeedsNumbersError(Exception):
    """A call cannot run on fake tensors."""


def find_of_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], home: int | None
) -> tuple[Any, bool]:
    """Return the results of a torch function, and whether it needed values."""
    if func is torch.autograd.grad:
        return _like_inputs(*args, **kwargs), False
    try:
        return run_fake(func, *_with_stand_ins((args, kwargs), make_fake)), False
    except NeedsNumbersError as error:
        results = run_on_made_up(lambda make: run_plain(func, *_with_stand_ins((args, kwargs), make)))
        sizes = [tensor.shape for tensor in tensors_in(results)]
        # Sizes that depend on another stage's values would be wrong here: `torch.where(chosen == 3)`.
        if sizes and all(_sizes_with(make, func, args, kwargs) in (None, sizes) for make in (_ones, _ramp)):
            return results, True
        whose = "a parameter that other stages hold, or on a tensor made from one"
        whose = whose if home is None else f"a tensor that stage {home} computes"
        raise ReadsValueError(
            f"code between the layers calls {getattr(func, '__name__', func)}() on {whose}, and every stage would need its "
            f"values ({str(error).splitlines()[0]})",
            fix="let the inputs alone decide, or move the code into a layer; or use pp=1",
        ) from error


def fails_on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException | None:
    """Return what a torch function raises where no tensor has values; None where shapes suffice."""

    def fake(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        return make_fake(Meta.of(tensor if value is None else value.any))

    try:
        run_fake(func, *replace_tensors((args, kwargs), fake))
    except NeedsNumbersError as error:
        return error.__cause__
    return None


def has_size_of_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether other stages' tensors decide the size of a result: with ones, twos and threes in them it differs.

    True where most of these do not fit, too: no size is known then.
    """
    if fails_on_fakes(func, args, kwargs) is None:
        return False
    tried = [_sizes_with(functools.partial(_filled, number), func, args, kwargs) for number in (1, 2, 3)]
    fit = [sizes for sizes in tried if sizes is not None]
    return len(fit) < 2 or any(sizes != fit[0] for sizes in fit)


def run_on_made_up(run: Callable[[Callable[[Meta], Tensor]], _T]) -> _T:
    """Return what a call gives on zeros in place of other stages' tensors, or on other values where it raises on zeros.

    A check in the code may not hold on zeros: a scale that is divided by, weights to draw from, a matrix to invert. Where it
    raises on all values, its error on zeros is the answer: the stage that has the real values raises it as well.

    Args:
        run: Takes what makes a tensor up, and makes the call.
    """
    try:
        return run(zeros_like_meta)
    except MeshwrightError:
        raise
    except Exception:
        for make in (_spread, _ones):
            with contextlib.suppress(Exception):
                return run(make)
        raise


def _sizes_with(
    make: Callable[[Meta], Tensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Size] | None:
    """Return the sizes of the results where `make` fills other stages' tensors, or None where the function raises."""
    try:
        return [tensor.shape for tensor in tensors_in(run_plain(func, *_with_stand_ins((args, kwargs), make)))]
    except (RuntimeError, IndexError, ValueError, AssertionError, ArithmeticError):
        return None


def _with_stand_ins(tree: Any, make: Callable[[Meta], Tensor]) -> Any:
    """Replace the tensors that have a record."""

    def stand_in(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        return tensor if value is None else make(Meta.of(value.any))

    return replace_tensors(tree, stand_in)


_FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of a call that fails on fake tensors: the call then runs on made-up values."""
    was_disabled, _FAKE_LOGGER.disabled = _FAKE_LOGGER.disabled, True
    try:
        yield
    finally:
        _FAKE_LOGGER.disabled = was_disabled


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Have autocast keep no cast weights inside the context: they would be fake ones, or of other values, in the next run."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def run_fake(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with FAKE_MODE, _quiet():
            return func(*args, **kwargs)
    except FakeTensorError as error:
        raise NeedsNumbersError(type(error).__name__) from error
    except (RuntimeError, TypeError, AttributeError, BufferError) as error:
        # C++ code that reads a tensor's numbers, an operator whose shapes torch knows for some dtypes (grouped_mm), or, before
        # torch 2.13, a subclass of Parameter: a TypeError. A copy of a fake tensor, or a view of its memory: one of the last two.
        # An error of the user's own code comes again from the run on values.
        raise NeedsNumbersError(str(error)) from error


def run_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with in_step(None), torch.random.fork_rng(devices):
        return func(*args, **kwargs)


def _like_inputs(_outputs: Any, inputs: Any, *_: Any, create_graph: bool = False, **__: Any) -> tuple[Tensor, ...]:
    """Return the shapes of torch.autograd.grad's results: a gradient for each input."""
    found = []
    for tensor in tensors_in(inputs):
        meta = Meta.of(tensor if (value := value_of(tensor)) is None else value.any)
        found.append(make_fake(dataclasses.replace(meta, requires_grad=create_graph)))
    return tuple(found)


def zeros_like_meta(meta: Meta) -> Tensor:
    zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    if not meta.requires_grad:
        return zeros
    with torch.enable_grad():
        return zeros.requires_grad_().clone()  # no leaf: code may write over it


def _spread(meta: Meta) -> Tensor:
    """Return positive numbers below one that differ, as scales, variances and probabilities do; integers are zeros."""
    zeros = zeros_like_meta(meta)
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        return zeros
    places = torch.arange(zeros.numel(), device=meta.device, dtype=torch.float64).reshape(meta.shape)
    with torch.no_grad():
        return zeros.copy_(0.25 + 0.5 * (places * 0.6180339887).frac())


def _filled(number: int, meta: Meta) -> Tensor:
    with torch.no_grad():
        return zeros_like_meta(meta).fill_(number)


_ones = functools.partial(_filled, 1)


def _waves(sign: int, meta: Meta) -> Tensor:
    """Return numbers of both signs; integers are zeros and ones."""
    zeros = zeros_like_meta(meta)
    places = torch.arange(zeros.numel(), device=meta.device, dtype=torch.float64).reshape(meta.shape)
    exact = not (meta.dtype.is_floating_point or meta.dtype.is_complex)
    with torch.no_grad():
        return zeros.copy_((sign * places.cos() > 0) if exact else sign * places.cos())


TRIED = (zeros_like_meta, _spread, _ones, functools.partial(_waves, 1), functools.partial(_waves, -1))
"""What fills tensors one after another where code is tried on several values: some of each sign, and their opposites."""


def _ramp(meta: Meta) -> Tensor:
    zeros = zeros_like_meta(dataclasses.replace(meta, requires_grad=False))
    return (torch.arange(zeros.numel(), device=meta.device) % 2**7).reshape(meta.shape).to(meta.dtype)
