"""Comparison of two scopes for whether an experiment with one is, bit for bit, the experiment with the other.

An experiment draws its parameters and activations by shape from a fixed seed, and takes everything else from the module and the
recorded call. Where the two agree in all of that, the same code computes with the same numbers, and a second run shows nothing
that the first did not. What has to agree:

- classes, functions (their code, globals, defaults, closures), hooks and modes: identical, or equal in every part;
- attributes: equal, nested ones too; tensors among them, buffers and arguments without gradient by their bits;
- parameters and arguments with gradient: shape, strides, dtype and flags, since their values are drawn;
- objects of other kinds, whose state Python does not show: one and the same object.

A module's own position (`layer_idx`) may differ only where no experiment has read it (`place_reads.py`).
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.tensor.guards.described import PLAIN, contents_of, slots_of, user_classes
from meshwright.apply.tensor.guards.signatures import PLACES
from meshwright.apply.tensor.search.trace import Call

__all__: list[str] = []

_HEAP_TYPE = 1 << 9
"""Flag of classes that are written in Python (Py_TPFLAGS_HEAPTYPE)."""


class Sameness(enum.Enum):
    """How far two scopes agree."""

    SAME = "everything that an experiment depends on is the same"
    BUT_PLACES = "the same, but for the positions that modules have of themselves"
    DIFFERENT = "something differs, or cannot be compared"


def sameness(one: nn.Module, calls: Sequence[Call], other: nn.Module, its_calls: Sequence[Call]) -> Sameness:
    """Return how far two scopes agree, each with its recorded calls in order."""
    pairs = _Pairs([*one.parameters(), *other.parameters()])
    mine = [(call.args, call.kwargs, call.ambient) for call in calls]
    theirs = [(call.args, call.kwargs, call.ambient) for call in its_calls]
    if not pairs.are_same(one, other) or not pairs.are_same_calls(mine, theirs):
        return Sameness.DIFFERENT
    if not pairs.differ_in_places:
        return Sameness.SAME
    # Such code would not be seen to read a position.
    if any(map(_opens_attributes, {kind for child in one.modules() for kind in user_classes(child)})):
        return Sameness.DIFFERENT
    return Sameness.BUT_PLACES


class _Pairs:
    """A walk through two object graphs at once; an object of one always meets the same object of the other."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.differ_in_places = False
        self._in_calls = False
        self._drawn = {id(parameter) for parameter in parameters if parameter.is_floating_point()}
        self._forth: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._alive: list[Any] = []  # an id identifies an object only while it lives

    def are_same_calls(self, one: Any, other: Any) -> bool:
        """Tell whether calls are the same; of activations among the arguments the shape counts."""
        self._in_calls = True
        return self.are_same(one, other)

    def are_same(self, one: Any, other: Any) -> bool:
        """Tell whether two values are the same to any code that has them."""
        if type(one) is not type(other):
            return False
        if isinstance(one, (*PLAIN, enum.Enum, type, types.BuiltinFunctionType)):
            return one is other or (isinstance(one, PLAIN) and repr(one) == repr(other))
        if id(one) in self._forth or id(other) in self._back:
            return self._forth.get(id(one)) == id(other) and self._back.get(id(other)) == id(one)
        self._forth[id(one)], self._back[id(other)] = id(other), id(one)
        self._alive += (one, other)
        if isinstance(one, Tensor):
            return self._are_same_tensors(one, other)
        return one is other or self._have_same_parts(one, other)

    def _are_same_tensors(self, one: Tensor, other: Tensor) -> bool:
        if one is other:
            return True
        if type(one) not in (Tensor, nn.Parameter, nn.Buffer) or one.layout != torch.strided or one.is_nested:
            return False
        if _facts(one) != _facts(other) or (id(one) in self._drawn) is not (id(other) in self._drawn):
            return False
        if id(one) in self._drawn:
            return True
        if not self._are_same_mappings(vars(one), vars(other)):
            return False
        is_activation = self._in_calls and one.requires_grad and not isinstance(one, nn.Parameter)
        return is_activation or (not one.is_meta and _have_same_bits(one, other))

    def _have_same_parts(self, one: Any, other: Any) -> bool:
        if isinstance(one, types.FunctionType):
            return (
                one.__code__ == other.__code__
                and one.__globals__ is other.__globals__
                and self._all(_held(one), _held(other))
            )
        if isinstance(one, types.MethodType):
            return self._all([one.__self__, one.__func__], [other.__self__, other.__func__])
        if isinstance(one, functools.partial):
            return self._all(
                [one.func, one.args, one.keywords, vars(one)], [other.func, other.args, other.keywords, vars(other)]
            )
        if type(one) in (list, tuple, collections.deque, torch.Size):
            return self._all(one, other)
        if type(one) in (dict, collections.OrderedDict):
            return self._are_same_mappings(one, other)
        if type(one) in (set, frozenset, range, slice):
            return one == other and all(
                isinstance(item, PLAIN) for item in (one if type(one) in (set, frozenset) else ())
            )
        if isinstance(one, nn.Module):
            return self._are_same_modules(one, other)
        return self._are_same_objects(one, other)

    def _all(self, ones: Any, others: Any) -> bool:
        return len(ones) == len(others) and all(map(self.are_same, ones, others))

    def _are_same_mappings(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
        keys = list(one)
        return (
            all(isinstance(key, PLAIN) for key in keys)
            and list(map(repr, keys)) == list(map(repr, other))
            and all(self.are_same(one[key], other[key]) for key in keys)
        )

    def _are_same_modules(self, one: nn.Module, other: nn.Module) -> bool:
        mine, theirs = vars(one), vars(other)
        if list(mine) != list(theirs) or slots_of(one) or slots_of(other):
            return False
        for key, value in mine.items():
            if key in PLACES and type(value) is int and type(theirs[key]) is int:
                self.differ_in_places = self.differ_in_places or value != theirs[key]
            elif key.endswith("hooks") and isinstance(value, dict):  # their keys are numbers of handles
                if not self._all(list(value.values()), list(theirs[key].values())):
                    return False
            elif not self.are_same(value, theirs[key]):
                return False
        return True

    def _are_same_objects(self, one: Any, other: Any) -> bool:
        """Tell whether two objects of a class in Python have the same attributes; others may hold what nobody sees."""
        is_pythons = all(kind is object or kind.__flags__ & _HEAP_TYPE for kind in type(one).__mro__)
        if not is_pythons or not hasattr(one, "__dict__"):
            return False
        return self._are_same_mappings(vars(one), vars(other)) and self._are_same_mappings(
            slots_of(one), slots_of(other)
        )


def _held(function: types.FunctionType) -> list[Any]:
    cells = [contents_of(cell) for cell in function.__closure__ or ()]
    return [function.__defaults__, function.__kwdefaults__, vars(function), *cells]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    flags = (tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *flags


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


@functools.lru_cache(maxsize=1 << 10)
def _opens_attributes(kind: type) -> bool:
    """Tell whether code of a class takes all of an object's attributes at once."""
    return any(
        isinstance(item, types.FunctionType) and _names(item.__code__) & {"__dict__", "vars", "__getattribute__"}
        for value in vars(kind).values()
        for item in (
            getattr(value, "fget", None),
            getattr(value, "__func__", None),
            getattr(value, "__wrapped__", None),
            value,
        )
    )


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))
