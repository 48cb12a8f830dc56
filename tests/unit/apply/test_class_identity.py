"""Classes of modules that are subclasses of the user's: comparisons by `is` are found, and attributes set on the user's class."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.modules.forwards import subclass_with, users_class, with_forward
from meshwright.apply.state.class_identity import refuse_class_identity


class Block(nn.Linear):
    """A layer of a class of its own."""


def _by_type(layer: Any, _: Any) -> bool:
    return type(layer) is Block


def _by_attribute(layer: Any, _: Any) -> bool:
    return layer.__class__ is not Block


def _turned(layer: Any, _: Any) -> bool:
    return Block is type(layer)


def _two_layers(layer: Any, other: Any) -> bool:
    return type(layer) is type(other)


def _by_variable(layer: Any, _: Any) -> bool:
    kind = type(layer)
    return kind is Block


def _of_torch(layer: Any, _: Any) -> bool:
    return type(layer) is nn.Linear


def _by_argument(layer: Any, kind: Any) -> bool:
    return type(layer) is kind


def _inside(layer: Any, _: Any) -> bool:
    return any(type(child) is Block for child in layer.children())


def _equal(layer: Any, other: Any) -> bool:
    return type(layer) == Block or layer.__class__ in (Block,) or isinstance(layer, type(other))  # noqa: E721


def _tensors(layer: Any, other: Any) -> bool:
    x: Any = other[0] if type(other) is tuple else other
    return x is None or type(x) is Tensor or type(x[0]) is int or layer is not other or type(layer) is None


def _imported(layer: Any, other: Any) -> bool:
    from collections import OrderedDict
    from fractions import Fraction as Ratio

    return type(other) is OrderedDict or type(other) is Ratio


def _imported_block(layer: Any, _: Any) -> bool:
    from torch.nn import Linear as Kind

    return type(layer) is Kind


def _names(layer: Any, other: Any) -> bool:
    kind = nn.Linear
    return type(layer).__name__ is other or other.shape is layer.shape or kind(in_features=1, out_features=1) is other


class Asking(nn.Module):
    """Asks a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.other = Block(2, 2), nn.Linear(2, 2)
        self.ask = function

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.ask(self.layer, x) else 1)


def _of_no_module(layer: Any, _: Any) -> bool:
    return type(layer) is nn.Conv1d or layer.__class__ is not nn.Sequential


def _of_a_lazy_module(layer: Any, _: Any) -> bool:
    return type(layer) is nn.Conv2d


@dataclasses.dataclass
class Settings:
    """A configuration, whose generated comparison asks for classes."""

    width: int = 2


SETTINGS = Settings()


def _compared(_: Any, __: Any) -> bool:
    return Settings() == SETTINGS


@pytest.mark.parametrize(
    "ask",
    [_by_type, _by_attribute, _turned, _two_layers, _by_variable, _of_torch, _by_argument, _inside, _imported_block],
)
def test_identity_of_classes_is_found(ask: Any) -> None:
    with pytest.raises(
        mw.ApplyError, match=rf"'{ask.__name__}' \(.*:{ask.__code__.co_firstlineno + 1}\)|{ask.__name__}"
    ):
        refuse_class_identity(Asking(ask), [], mw.Plan(tp=2))


def test_the_class_that_a_lazy_module_gets_is_one_of_the_models() -> None:
    module = Asking(_of_a_lazy_module)
    refuse_class_identity(module, [], mw.Plan(tp=2))
    module.other = nn.LazyConv2d(2, 1)
    with pytest.raises(mw.ApplyError, match="_of_a_lazy_module"):
        refuse_class_identity(module, [], mw.Plan(tp=2))


@pytest.mark.parametrize("ask", [_equal, _tensors, _names, _imported, _compared, _of_no_module])
def test_other_comparisons_are_not(ask: Any) -> None:
    refuse_class_identity(Asking(ask), [], mw.Plan(tp=2))


class Plain(nn.Module):
    """Calls a method that a class beside it has in another form."""

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)

    def predict(self, x: Tensor) -> Tensor:
        return x

    def task(self) -> str:
        return "detect" if isinstance(self, Detecting) else "classify"


class Detecting(Plain):
    """Asks for a class where it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(2, 2)

    def predict(self, x: Tensor) -> Tensor:
        return x + 1 if type(self.block) is Block else x


class Making(Plain):
    """Predicts by a module that it makes."""

    def predict(self, x: Tensor) -> Tensor:
        return Detecting().predict(x)


HELD = [Detecting()]


class Holding(Plain):
    """Predicts by a module that stands outside of it."""

    def predict(self, x: Tensor) -> Tensor:
        return HELD[0].predict(x)


class Taking(Plain):
    """Has taken the method of another class."""

    predict = Detecting.predict


class Wrapping(Plain):
    """Predicts by the method of another class, which a helper holds."""

    predict = functools.partialmethod(Detecting.predict)


def _given(method: Any) -> Any:
    def predict(self: Any, x: Tensor) -> Tensor:
        return method(self, x)

    return predict


class Closing(Plain):
    """The like, in a closure."""

    predict = _given(Detecting.predict)


def test_a_method_of_a_class_that_no_module_has_does_not_ask() -> None:
    module = Plain()
    module.block = Block(2, 2)
    refuse_class_identity(module, [], mw.Plan(tp=2))


class Augmenting(nn.Module):
    """Asks in a method that only another method than forward calls, for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)

    def predict(self, x: Tensor) -> Tensor:
        return self.augment(x) if len(x) > 1 else x

    def augment(self, x: Tensor) -> Tensor:
        return x + 1 if type(self.block) is Block else x


def test_a_method_that_no_forward_names_asks_once_it_is_called() -> None:
    module = Augmenting()
    refuse_class_identity(module, [], mw.Plan(tp=2))
    assert module(torch.ones(1)) == 1
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    for one in (module, copied):
        with pytest.raises(mw.ApplyError, match=r"Augmenting\.augment.*tp=2"):
            one(torch.ones(2))


@pytest.mark.parametrize("kind", [Detecting, Making, Holding, Taking, Wrapping, Closing])
def test_a_method_of_a_class_that_is_used_asks(kind: type[nn.Module]) -> None:
    module = kind()
    module.add_module("block", Block(2, 2))
    with pytest.raises(mw.ApplyError, match=r"Detecting\.predict"):
        refuse_class_identity(module, [], mw.Plan(tp=2))


def test_a_subclass_is_equal_to_the_users_class() -> None:
    kind = with_forward(subclass_with(Block, {}), lambda _, x: x)
    assert users_class(kind) is Block
    assert kind is not Block
    assert (kind == Block, Block == kind, kind != Block, hash(kind) == hash(Block)) == (True, True, False, True)
    tables: list[dict[Any, int]] = [{Block: 1}, {kind: 1}]
    assert tables[0][kind] == tables[1][Block] == 1
    assert kind != nn.Linear
    layer: Any = Block(2, 2)
    other = Block(2, 2)
    layer.__class__ = kind
    assert isinstance(other, type(layer))
    assert isinstance(layer, Block)
    assert not isinstance(nn.Linear(2, 2), type(layer))
    assert issubclass(Block, type(layer))
    assert not issubclass(nn.Linear, type(layer))
    assert torch.equal(layer(torch.ones(2)), torch.ones(2))


def test_a_users_metaclass_is_kept() -> None:
    class Registered(type):
        names: ClassVar[list[str]] = []

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            Registered.names.append(cls.__name__)
            return super().__call__(*args, **kwargs)

    class Layer(nn.Linear, metaclass=Registered):
        pass

    kind = with_forward(Layer, lambda _, x: x)
    kind(2, 2)
    assert Registered.names == ["Layer"]
    assert isinstance(type(kind), type)
    assert isinstance(kind, Registered)
    assert kind == Layer


class Tallied(nn.Module):
    """A block that counts the calls of all blocks of its class in an attribute that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls = getattr(type(self), "calls", 0) + 1  # pyright: ignore[reportAttributeAccessIssue]
        return torch.tanh(self.lin(x)) * (1 + 0.1 * type(self).calls)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_class_counts_the_calls_of_all_of_its_layers(kind: str) -> None:
    # Each layer had a class of its own, and with it a counter of its own.
    def train(line: str) -> list[float]:
        if hasattr(Tallied, "calls"):
            del Tallied.calls
        torch.manual_seed(0)
        module = nn.Sequential(Tallied(), Tallied(), nn.Linear(6, 3)).double()
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        model = mw.apply_plan(module, line, loss_fn=lambda out, batch: out.square().mean(), optimizer=sgd, seed=0)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        losses = [model.step((x, None)).loss for _ in range(4)]
        model.close()
        return losses

    assert train(f"single,recompute={kind}") == pytest.approx(train("single"), rel=1e-12)
    assert vars(Tallied)["calls"] == 8


def test_a_module_of_a_part_is_not_pickled_and_says_how_to_save_it() -> None:
    # pickle's own words were that the class is not the same object.
    layer = Block(2, 2)
    layer.__class__ = with_forward(Block, lambda self, x: x)
    with pytest.raises(mw.ApplyError, match="would not be the model's") as refused:
        pickle.dumps(nn.Sequential(layer))
    assert "model.full_state_dict()" in str(refused.value)
    assert type(copy.deepcopy(layer)) is type(layer)


def test_a_module_that_recompute_repeats_is_pickled_as_one_of_its_own_class() -> None:
    layer = Block(2, 2)
    layer.__class__ = with_forward(Block, lambda self, x: x, is_whole=True)
    found = pickle.loads(pickle.dumps(layer))
    assert type(found) is Block
    assert torch.equal(found.weight, layer.weight)
    layer.__class__ = with_forward(with_forward(Block, lambda self, x: x), lambda self, x: x, is_whole=True)
    with pytest.raises(mw.ApplyError, match="would not be the model's"):
        pickle.dumps(layer)


class Adapted(abc.ABC):
    """An abstract class, which asks each of its subclasses who is one of them."""

    @abc.abstractmethod
    def adapters(self) -> int:
        """Return a number."""


class AdaptedLinear(nn.Linear, Adapted):
    """A layer of that class, as peft's are."""

    def adapters(self) -> int:
        return 1


def test_abstract_classes_that_ask_their_subclasses_come_to_an_end() -> None:
    first = with_forward(AdaptedLinear, lambda _, x: x)
    second = with_forward(first, lambda _, x: x)
    for kind in (AdaptedLinear, first, second, Adapted):
        assert not isinstance(Block(2, 2), kind)
        assert not issubclass(nn.Conv1d, kind)
        assert isinstance(second(2, 2), kind)
        assert issubclass(AdaptedLinear, kind)
        assert issubclass(first, kind)
