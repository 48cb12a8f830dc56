"""Recompute of layers that keep state in memory outside of torch, or write over their inputs unseen: one forward's numbers."""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.pipeline.tracing.scene import Scene
from meshwright.apply.state.attributes import insides_put_back, read_parts, write_parts
from meshwright.apply.state.copied_iterators import can_be_copied, copied, position_of
from meshwright.apply.tensor.guards.signatures import StructureSnapshot
from meshwright.errors import ApplyError

_OF_MODULE = np.zeros(2)


class Slots:
    """A counter whose attribute is in a slot, under a private name."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def next(self) -> int:
        self.__count += 1
        return self.__count


@dataclasses.dataclass(slots=True)
class Fields:
    """Slots of a dataclass, beside an attribute that may be missing."""

    count: int = 0


class Counted(nn.Module):
    """A layer that counts its forwards before anything that backward needs.

    Args:
        state: Where it counts.
        count: Adds one and returns the number.
    """

    def __init__(self, state: Any, count: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.state, self.count = state, count

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 0.1 * self.count(self.state)
        return x + self.b(torch.tanh(self.a(x) * factor))


class Writes(nn.Module):
    """A layer that writes over its input in a way that no version counter shows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.way = nn.Linear(6, 6), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "numpy":
            values = x.detach().numpy()
            values *= 0.9
        else:
            x.data.mul_(0.9)
        return x + torch.tanh(self.a(x))


def _add(state: Any) -> float:
    state[0] += 1
    return float(state[0])


def _add_to_modules(_: Any) -> float:
    _OF_MODULE[1] += 1
    return float(_OF_MODULE[1])


def _add_to_field(state: Fields) -> float:
    state.count += 1
    return state.count


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "numpy": (lambda: np.zeros(3), _add),
    "numpy in a list": (lambda: [np.zeros(3)], lambda state: _add(state[0])),
    "numpy of a module": (lambda: None, _add_to_modules),
    "bytearray": (lambda: bytearray(2), _add),
    "array.array": (lambda: array.array("d", [0.0]), _add),
    "slots": (Slots, Slots.next),
    "dataclass": (Fields, _add_to_field),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([0.5, 2.0, 3.0, 5.0]), next),
}


def _steps(build: Callable[[], nn.Module], plan: str) -> list[Any]:
    """Return losses, gradients and parameters of three steps; of the plain process where the plan is empty."""
    _OF_MODULE[:] = 0
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in "xy") for _ in range(3)]
    found: list[Any] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), build(), build()).double()

    if not plan:
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x, y in batches:
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            found += [loss.item(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
            optimizer.step()
        return found
    optimizer_of = functools.partial(torch.optim.SGD, lr=0.1)
    loss_of = lambda outputs, batch: (outputs - batch[1]).square().mean()  # noqa: E731
    with mw.apply_plan(make, plan, loss_fn=loss_of, optimizer=optimizer_of) as model:
        for batch in batches:
            result = model.step(batch)
            found += [result.loss, *(g.clone() for g in model.full_gradients().values())]
    return found


def _is_alike(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=1e-13) for a, b in pairs)


@pytest.mark.parametrize("plan", ["recompute=full", "recompute=selective"])
@pytest.mark.parametrize("kind", COUNTERS)
def test_counters_in_other_memory_advance_once(kind: str, plan: str) -> None:
    make, count = COUNTERS[kind]
    build = lambda: Counted(make(), count)  # noqa: E731
    assert _is_alike(_steps(build, plan), _steps(build, ""))


@pytest.mark.parametrize("plan", ["recompute=full", "recompute=selective"])
@pytest.mark.parametrize("way", ["numpy", "data"])
def test_an_input_that_is_written_unseen_is_repeated_from_what_it_was(way: str, plan: str) -> None:
    build = functools.partial(Writes, way)
    assert _is_alike(_steps(build, plan), _steps(build, ""))


def test_an_array_in_a_tensors_memory_is_refused() -> None:
    def build() -> nn.Module:
        values = np.ones(6)
        layer = Counted(values, lambda state: float(state[0]))
        layer.register_buffer("view", torch.from_numpy(values))
        return layer

    def doubled() -> nn.Module:
        return nn.Sequential(build(), nn.Linear(6, 6))

    model = mw.apply_plan(doubled, "recompute=full", loss_fn=lambda out, _: out.mean())
    with pytest.raises(ApplyError, match=r"the array 'state' and the tensor 'view'"):
        model.step((torch.zeros(2, 6), torch.zeros(2, 6)))


def test_a_copied_cycle_goes_on_by_itself() -> None:
    first = itertools.cycle([1, 2, 3])
    next(first)
    second = copied(first)
    assert position_of(first) == position_of(second)
    assert [next(first) for _ in range(4)] == [2, 3, 1, 2]
    assert [next(second) for _ in range(4)] == [2, 3, 1, 2]
    assert can_be_copied(first)
    assert not can_be_copied(itertools.cycle(number for number in range(3)))


def test_slots_are_set_and_deleted() -> None:
    state = Fields(3)
    parts = read_parts(state)
    del state.count
    assert read_parts(state) == {}
    write_parts(state, parts)
    assert state.count == 3
    write_parts(state, {})
    assert not hasattr(state, "count")


def _frozen(base: Any, *entries: Any) -> Any:
    def refuse(*_: Any) -> None:
        raise TypeError("this container is frozen")

    kind: Any = type("Frozen", (base,), {})
    made = kind(*entries)
    for name in ("__setitem__", "__delitem__", "clear", "update", "extend"):
        if hasattr(base, name):
            setattr(kind, name, refuse)
    return made


@pytest.mark.parametrize("base", [OrderedDict, dict])
def test_a_frozen_dict_keeps_its_contents_and_gets_back_what_changed(base: Any) -> None:
    frozen = _frozen(base, {"a": 1, "b": 2})
    with insides_put_back(frozen):
        pass
    assert list(frozen.items()) == [("a", 1), ("b", 2)]
    with insides_put_back(frozen):
        base.__setitem__(frozen, "c", 3)
        base.__delitem__(frozen, "a")
    assert list(frozen.items()) == [("a", 1), ("b", 2)]


def test_a_frozen_list_gets_back_what_changed() -> None:
    frozen = _frozen(list, [1, 2])
    with insides_put_back(frozen):
        list.append(frozen, 3)
    assert frozen == [1, 2]


def test_the_order_of_an_ordered_dict_is_restored() -> None:
    table = OrderedDict(a=1, b=2)
    with insides_put_back(table):
        table.move_to_end("a")
    assert list(table) == ["a", "b"]


def test_keys_of_an_ordered_dict_are_taken_back() -> None:
    class Forbids(OrderedDict[str, int]):
        def __delitem__(self, key: str) -> None:
            raise TypeError(key)

    given: Any = {"plain": OrderedDict(a=1), "own": Forbids(a=1)}
    scene = Scene((given,), {})
    given["plain"]["b"], given["own"]["b"] = 2, 2
    scene.restore()
    assert dict(given["plain"]) == dict(given["own"]) == {"a": 1}
    assert list(copy.copy(given["plain"])) == list(given["own"]) == ["a"]


@pytest.mark.parametrize("kind", ["numpy", "bytearray", "count", "cycle"])
def test_a_snapshot_of_a_module_sees_writes_into_other_memory(kind: str) -> None:
    make, count = COUNTERS[kind]
    layer = Counted(make(), count)
    snapshot = StructureSnapshot(layer)
    assert snapshot.is_current()
    count(layer.state)
    assert not snapshot.is_current()


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ApplyError, match="Tanh has no parameters"):
        mw.apply_plan(nn.Tanh, "single", optimizer=functools.partial(torch.optim.SGD, lr=0.1))


class _Makes(OrderedDict[str, Any]):
    """A table that makes an object of an entry's class when it is asked, as transformers has one of its activations."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class _Doubles(list[int]):
    def __iter__(self) -> Any:
        return (2 * value for value in super().__iter__())


_TABLE = _Makes(tanh=nn.Tanh, relu=nn.ReLU)


class _ByTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), _TABLE["tanh"]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


def test_entries_are_read_as_they_are_kept() -> None:
    assert read_parts(_TABLE) == {"tanh": nn.Tanh, "relu": nn.ReLU}
    values = _Doubles([1, 2])
    write_parts(values, read_parts(values))
    assert list.__repr__(values) == "[1, 2]"


def test_a_table_that_makes_its_objects_stays_as_it_was() -> None:
    """It is a global variable of the model's code, which is put back after trials."""
    model = mw.apply_plan(
        _ByTable,
        "single,micro_batches=2",
        loss_fn=lambda outputs, batch: (outputs - batch[1]).square().mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
    model.step((torch.ones(4, 3), torch.zeros(4, 3)))
    model.close()
    assert isinstance(_ByTable().act, nn.Tanh)
