"""Stand-ins for tensors of other stages, and the record of the stage that computes each tensor.

On the stage that computes it, a value is a plain tensor. Every other stage has a `StandIn`: its shape, dtype, device and
`requires_grad` are right, and it has no values. All stages record the same home for a tensor, since they run the same forward.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import TensorWeakRef

from meshwright._torch_private import WrapperTensor, fake_mode_without_addresses
from meshwright.errors import ApplyError
from meshwright.trees import LEAVES, map_tensors, tensors_in

__all__: list[str] = []

ATTRIBUTE = "_meshwright_value"


class StageValue:
    """Record of one tensor of a forward.

    A tensor holds its record, so the record must not hold the tensor: memory of activations would stay until the collector of
    cycles comes, which knows nothing of their size. What was received is held until the forward is over, since nobody else may.

    Args:
        owner: The forward that it belongs to.
        home: The stage that computes it; None where it depends on parameters and inputs alone, on the stages that hold those.
        real: The tensor that this record is attached to, if this stage has it.
        stand_in: The stand-in that the user's code holds, if this stage does not compute it; it may have been received since.
    """

    __slots__ = ("_received", "_weak", "heir", "home", "is_stale", "owner", "sent_to", "stand_in")

    def __init__(self, owner: object, home: int | None, real: Tensor | None, stand_in: Tensor | None) -> None:
        self.owner = owner
        self.home = home
        self._weak = None if real is None else TensorWeakRef(real)
        self._received: Tensor | None = None
        self.stand_in = stand_in
        self.sent_to: set[int] = set()
        self.heir: StageValue | None = None
        """What a later forward knows of the same tensor."""
        self.is_stale = False
        """Whether its memory was written over under another name, after a stage got a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave nothing with a copy of the tensor: outside of a forward it is one that every stage has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def real(self) -> Tensor | None:
        """The tensor; None where this stage does not have it."""
        return None if self._weak is None else self._weak()

    def receive(self, tensor: Tensor) -> Tensor:
        """Attach this record to the tensor that another stage has sent, and hold it until `release`."""
        self._received, self._weak = mark(tensor, self), TensorWeakRef(tensor)
        return tensor

    def release(self) -> None:
        """Hold what was received no longer: autograd and the user's code hold what they need of it."""
        self._received = None

    def lose(self) -> None:
        """Have no tensor any more: another stage's is the right one."""
        self._received = self._weak = None

    @property
    def any(self) -> Tensor:
        """The tensor or its stand-in: right in shape and dtype."""
        real = self.real
        found = real if real is not None else self.stand_in
        if found is None:
            raise AttributeError("a value without a tensor")
        return found


class UnitMark(NamedTuple):
    """Record, on a tensor that a unit has made inside, of that unit's call in an observed forward."""

    owner: object
    """The forward's observer."""
    place: int
    """The call's position in it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave nothing with a copy of the tensor; the observer is not the user's, and holds tensors that cannot be copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def value_of(tensor: Tensor) -> StageValue | None:
    """Return the record of a tensor; None for one that every stage has."""
    return getattr(tensor, ATTRIBUTE, None)


def mark(tensor: Tensor, value: StageValue) -> Tensor:
    """Attach a record to a tensor."""
    setattr(tensor, ATTRIBUTE, value)
    return tensor


def unmark(tensor: Tensor) -> None:
    """Remove the record of a tensor."""
    delattr(tensor, ATTRIBUTE)


def values_in(*trees: Any) -> list[StageValue]:
    """Return the records of the tensors in lists, tuples, mappings, slices and dataclasses."""
    found: list[StageValue] = []
    _find_values(trees, found)
    return found


def _find_values(items: Iterable[Any], found: list[StageValue]) -> None:
    # Called for every argument of the code between layers: the common types come first.
    for item in items:
        if isinstance(item, Tensor):
            value = getattr(item, ATTRIBUTE, None)
            if value is not None:
                found.append(value)
            continue
        kind = type(item)
        if kind in LEAVES:
            continue
        if isinstance(item, (list, tuple)):
            _find_values(item, found)
        elif isinstance(item, dict):
            if item:
                _find_values(item.values(), found)
        elif kind is slice:
            _find_values((item.start, item.stop, item.step), found)
        elif dataclasses.is_dataclass(kind):
            _find_values((getattr(item, field.name, None) for field in dataclasses.fields(item)), found)


def replace_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the same containers, slices among them, with `function` applied to each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind in LEAVES:
        return tree
    if kind is tuple or kind is list:
        return kind([replace_tensors(item, function) for item in tree])
    if kind is slice:
        return slice(*(replace_tensors(part, function) for part in (tree.start, tree.stop, tree.step)))
    return map_tensors(tree, function)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in the same containers, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind in LEAVES:
        return []
    if kind is slice:
        tree = (tree.start, tree.stop, tree.step)
    elif kind is dict:
        tree = tree.values()
    elif kind is not tuple and kind is not list:
        return list(tensors_in(tree))
    return [tensor for item in tree for tensor in tensors_of(item)]


@dataclasses.dataclass(frozen=True, slots=True)
class Meta:
    """Description of a tensor: all but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Describe a tensor."""
        if isinstance(tensor, StandIn):
            meta, requires_grad = tensor.meta, tensor.requires_grad
            return (
                meta if meta.requires_grad == requires_grad else dataclasses.replace(meta, requires_grad=requires_grad)
            )
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class StandIn(WrapperTensor):
    """A tensor without values, which the user's code holds in place of another stage's tensor.

    The walk under way intercepts every torch function that takes one, so torch's operators never receive one.
    """

    meta: Meta
    """What it was made from; `requires_grad` may have been switched since."""

    def __new__(cls, meta: Meta) -> StandIn:
        tensor = cls.make(
            meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device, requires_grad=meta.requires_grad
        )
        tensor.meta = meta
        return tensor

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] - what a tensor takes is for its values
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # an autograd.Function between stages saves its result
            return StandIn(dataclasses.replace(Meta.of(args[0]), requires_grad=False))
        raise StrayValueError(str(func))


class StrayValueError(ApplyError):
    """Code outside torch's function dispatch was given a tensor that another stage computes."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place} was given a tensor that another pipeline stage computes, so its values are not on this rank: code that "
            "torch functions do not see has used it (a C++ extension, for example), or it was kept from an earlier batch",
            fix="move such code into a layer, or use pp=1",
        )


class OtherParameterError(ApplyError):
    """Code that no stage is known to run uses a parameter that another stage holds."""

    def __init__(self, stage: int) -> None:
        super().__init__(
            f"stage {stage} needs a parameter that another stage holds: the forward took another path than the traced one, from "
            "which the stages were cut (rule: a parameter is used by the layers of the traced forward)",
            fix="pass an example_batch= to apply_plan that takes every branch, or use pp=1",
        )


FAKE_MODE = fake_mode_without_addresses()


def make_fake(meta: Meta) -> Tensor:
    """Return a fake tensor of this description; torch functions run on it give the descriptions of their results.

    It is not a leaf where it requires a gradient, since code may write into it.
    """
    with FAKE_MODE:
        tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        if meta.requires_grad:
            with torch.enable_grad():
                tensor = tensor.requires_grad_().clone()
    return tensor


def describe_tensor(tensor: Tensor, value: StageValue | None) -> tuple[Any, ...]:
    """Return `describe` of a tensor with this record."""
    if value is not None:
        tensor = value.any
    if isinstance(tensor, StandIn):
        meta = tensor.meta
        return (meta.shape, meta.dtype, tensor.requires_grad, meta.stride)
    return (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride())


def describe(tree: Any) -> Any:
    """Return a hashable key, equal for two argument trees from which a function makes results of equal shapes."""
    if isinstance(tree, Tensor):
        return describe_tensor(tree, value_of(tree))
    kind = type(tree)
    if kind in LEAVES:
        return (kind, tree)
    if isinstance(tree, (list, tuple)):
        sizes = tuple(tree.batch_sizes.tolist()) if isinstance(tree, PackedSequence) else ()
        return (kind.__name__, *sizes, *[describe(item) for item in tree])
    if isinstance(tree, dict):
        return ("dict", *[(key, describe(item)) for key, item in tree.items()])
    if kind is slice:
        return ("slice", describe(tree.start), describe(tree.stop), describe(tree.step))
    if dataclasses.is_dataclass(kind):
        return (kind, *[describe(getattr(tree, field.name, None)) for field in dataclasses.fields(tree)])
    return (kind, _describe_object(tree))


_NUMBERS = (numbers.Number, np.generic, enum.Enum, str, range, frozenset)


def _describe_object(item: Any) -> Any:
    """Return what distinguishes two objects of one class: their value, or their plain attributes."""
    if isinstance(item, _NUMBERS):
        return item
    if isinstance(item, (np.ndarray, set)):
        return str(item)
    if callable(item):
        return item
    attributes = getattr(item, "__dict__", None)
    if not attributes:
        return None
    return tuple((key, describe(value)) for key, value in attributes.items() if _is_plain(value))


def _is_plain(item: Any) -> bool:
    return isinstance(item, Tensor) or type(item) in LEAVES or type(item) in (list, tuple)
