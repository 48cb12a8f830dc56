"""Caches of functions: which are found, and which are cleared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from meshwright.describe.fakes import make_fake_mode
from meshwright.describe.function_caches import no_cached_tensors


@functools.cache
def table(size: int) -> Tensor:
    return torch.ones(size)


@functools.lru_cache(maxsize=4)
def several(size: int) -> dict[str, list[Tensor]]:
    return {"tables": [torch.ones(size)]}


@functools.cache
def number(size: int) -> int:
    return size + 1


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    kept = functools.lru_cache(maxsize=1)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept(*args)

    return wrapper


class Positions(nn.Module):
    """Keeps tables by three kinds of caches."""

    @decorated
    def of_method(self, size: int) -> Tensor:
        return torch.ones(size)

    @staticmethod
    @functools.cache
    def of_class(size: int) -> Tensor:
        return torch.ones(size)

    def __init__(self) -> None:
        super().__init__()
        self.of_instance = functools.cache(torch.ones)


def test_what_a_trial_has_cached_is_dropped_wherever_it_is() -> None:
    module = Positions()
    calls = (table, module.of_method, module.of_class, module.of_instance, lambda size: several(size)["tables"][0])
    with no_cached_tensors(module), make_fake_mode():
        fakes = [call(3) for call in calls]
    assert [type(call(3)) for call in calls] == [Tensor] * len(calls)
    assert all(type(fake) is not Tensor for fake in fakes)


def test_caches_of_classes_in_a_function_are_found_by_the_module() -> None:
    @functools.cache
    def local(size: int) -> Tensor:
        return torch.ones(size)

    class Local(nn.Module):
        def forward(self, size: int) -> Tensor:
            return local(size)

    module = Local()
    with no_cached_tensors(module), make_fake_mode():
        module(3)
    assert type(module(3)) is Tensor


def test_what_was_cached_before_and_what_holds_no_tensor_stays() -> None:
    module = Positions()
    before, of_number = table(5), number.cache_info().misses
    with no_cached_tensors(module):
        assert table(5) is before
        number(5)
    assert table(5) is before
    number(5)
    assert number.cache_info().misses == of_number + 1


def test_caches_are_cleared_after_an_error() -> None:
    try:
        with no_cached_tensors(), make_fake_mode():
            table(7)
            raise ValueError
    except ValueError:
        assert type(table(7)) is Tensor


def test_weights_that_a_parametrization_caches_are_a_trials_own():
    """A trial runs without gradients: its weights would be the step's."""
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        with no_cached_tensors(), torch.no_grad():
            assert layer.weight is not layer.weight
        kept = layer.weight
        with no_cached_tensors():
            assert layer.weight is not kept
        assert layer.weight is kept
    assert kept.requires_grad
    assert layer.weight is not kept
