"""State that code keeps beside its modules is found, kept and put back."""

from __future__ import annotations

import itertools
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.state.outside import Outside

NUMBER = 1
ENTRIES = [1]
CACHE: dict[str, int] = {}
VALUES = torch.zeros(3)
COUNTER = itertools.count()
GENERATOR = random.Random(3)


class Stateful(nn.Module):
    """Writes into everything that it can reach."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.own = [1]

    def forward(self, x: Tensor) -> Tensor:
        global NUMBER
        NUMBER += 1
        ENTRIES.append(len(ENTRIES))
        VALUES.add_(1)
        Stateful.calls += 1
        self.own.append(2)
        return x * next(COUNTER) * GENERATOR.random()


class Caching(nn.Module):
    """Fills a cache."""

    def forward(self, x: Tensor) -> Tensor:
        CACHE[str(len(CACHE))] = 1
        return x


class Drawing(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * _draw()


def _draw() -> float:
    return random.random()


def _state(module: Any) -> list[Any]:
    return [
        NUMBER,
        list(ENTRIES),
        VALUES.tolist(),
        Stateful.calls,
        list(module.own),
        GENERATOR.getstate(),
        repr(COUNTER),
    ]


def test_what_a_forward_writes_elsewhere_is_put_back() -> None:
    module = Stateful()
    before, moment = _state(module), Outside.of(module).take()
    first = module(torch.ones(1)), module(torch.ones(1))
    assert all(now != then for now, then in zip(_state(module), before, strict=True))
    moment.restore()
    assert _state(module) == before
    moment = Outside.of(module).take()
    assert (module(torch.ones(1)), module(torch.ones(1))) == first
    moment.restore()


def test_changes_are_named_and_caches_are_none() -> None:
    module, caching = Stateful(), Caching()
    moment, of_cache = Outside(module).take(with_attributes=False), Outside(caching).take(with_attributes=False)
    module(torch.ones(1))
    caching(torch.ones(1))
    assert {"NUMBER", "ENTRIES", "Stateful.calls", "GENERATOR"} <= set(moment.changed().values())
    assert of_cache.changed() == {}
    assert "NUMBER" in Outside(Stateful()).take(with_attributes=False).reaches(moment.changed())
    assert Outside(Caching()).take(with_attributes=False).reaches(moment.changed()) == []
    moment.restore()


def test_a_closures_variable_and_an_objects_attributes_are_kept() -> None:
    count = 0

    class Holder:
        factor = 1.0

        def __init__(self) -> None:
            self.step = 0

        def loss(self, outputs: Tensor, _: Any) -> Tensor:
            nonlocal count
            count += 1
            self.step += 1
            return outputs.sum()

    holder = Holder()
    outside = Outside(None, [holder.loss])
    values, moment = outside.plain_values(), outside.take()
    holder.loss(torch.ones(1), None)
    assert outside.plain_values() != values
    moment.restore()
    assert (count, holder.step) == (0, 0)
    assert outside.plain_values() == values


@pytest.mark.parametrize(("kind", "draws"), [(Drawing, True), (Caching, False), (nn.Dropout, False)])
def test_code_that_may_draw_from_pythons_generator_is_known(kind: type[nn.Module], draws: bool) -> None:
    assert Outside(kind()).draws == draws


class Registry:
    """Has no code of its own: a forward elsewhere counts in it."""

    calls = 0


def ticks() -> int:
    """Count in an attribute of its own, which the first call makes."""
    ticks.count = getattr(ticks, "count", 0) + 1  # pyright: ignore[reportFunctionMemberAccess]
    return ticks.count  # pyright: ignore[reportFunctionMemberAccess]


class Counted:
    """A base whose method makes an attribute of the class that it runs for."""

    def tick(self) -> int:
        kind: Any = type(self)
        kind.number = getattr(kind, "number", 0) + 1
        return kind.number


class Counting(Counted, nn.Module):
    """Counts its calls in four places, three of which are not there before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.by_module: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def forward(self, x: Tensor) -> Tensor:
        Registry.calls += 1
        self.by_module[self] = self.by_module.get(self, 0) + 1
        return x * (self.tick() + ticks() + Registry.calls + self.by_module[self])


def test_counters_that_the_first_call_makes_are_put_back() -> None:
    """A trial under every plan, `single` too, left them at 1, and each step of training was one call ahead."""
    module, x = Counting(), torch.ones(1)
    outside = Outside(module)
    for calls in (1, 2, 3):
        moment = outside.take()
        assert module(x).item() == 4 * calls
        moment.restore()
        assert module(x).item() == 4 * calls


class Tallied(nn.Module):
    """Keeps nothing outside of itself before its first call."""

    def forward(self, x: Tensor) -> Tensor:
        kind: Any = type(self)
        kind.seen = getattr(kind, "seen", 0) + 1
        return x * kind.seen


def test_code_that_makes_class_attributes_is_not_taken_for_code_without_state() -> None:
    """Recompute watched no such layer, and its repetition counted once more."""
    assert not Outside(Tallied()).is_empty
    assert Outside(nn.Dropout()).is_empty


class ByComputedName(nn.Module):
    """Counts in an attribute of its class whose name it computes."""

    def forward(self, x: Tensor) -> Tensor:
        name = "of_" + type(self).__name__
        setattr(type(self), name, getattr(type(self), name, 0) + 1)
        return x * getattr(type(self), name)


def test_class_attributes_of_computed_names_are_put_back() -> None:
    module, x = ByComputedName(), torch.ones(1)
    outside = Outside(module)
    for calls in (1, 2, 3):
        moment = outside.take()
        assert module(x).item() == calls
        moment.restore()
        assert module(x).item() == calls
