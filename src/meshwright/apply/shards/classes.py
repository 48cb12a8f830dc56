"""Guarded tensor classes for tensors of which a rank has a part, used wherever user code can reach them.

Inside the engine a parameter that is cut is a plain tensor, so that each kernel runs as without Meshwright. While user code runs
(between steps, between layers, in the loss, in hooks) its `__class__` is a subclass with `__torch_function__`, in the way that
torch's own UninitializedParameter becomes a plain one. Metadata, and functions that treat each entry by itself, work as usual,
and their results are shards too. Functions that mix entries, or give values out, raise ApplyError.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_function_subclasses
from meshwright.apply.shards import elementwise as rules
from meshwright.apply.shards.facts import ShardFacts
from meshwright.errors import ApplyError
from meshwright.trees import arguments_in, map_tensors

__all__: list[str] = []

_FACTS: Final = "_meshwright_shard"
_PLAIN: Final = "_meshwright_plain"
_GRAD: Final = cast("Any", Tensor.grad)


class ShardTensor(Tensor):
    """A tensor of which this rank has the part that `facts_of` describes. Made by `as_shard`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _ShardCall(func, args, kwargs or {}).run()

    def detach(self) -> Tensor:
        """Detach it from its graph; refused for a parameter made of a parameter."""
        _refuse_new_parameter(self, sys._getframe(1))
        return super().detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = as_shard(self.detach().clone(), facts_of(self)).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            made._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if facts_of(self).saves_as_plain:
            return as_plain(self).__reduce_ex__(protocol)
        return facts_of(self).refuse("a pickled copy")


def facts_of(tensor: Tensor) -> ShardFacts:
    """Return the facts about a shard."""
    return vars(tensor)[_FACTS]


def known_facts(tensor: Tensor) -> ShardFacts | None:
    """Return the facts about a tensor, which may be whole and plain now; None where there are none."""
    return vars(tensor).get(_FACTS)


def set_facts(tensor: Tensor, facts: ShardFacts | None) -> None:
    """Set the facts about this rank's part of a tensor; None removes them."""
    if facts is None:
        vars(tensor).pop(_FACTS, None)
    else:
        vars(tensor)[_FACTS] = facts


def as_shard(tensor: Tensor, facts: ShardFacts) -> Tensor:
    """Return a guarded alias of a plain tensor, with its graph."""
    with without_function_subclasses():
        made = tensor.as_subclass(ShardTensor)
    vars(made)[_FACTS] = facts
    return made


def as_plain(tensor: Tensor) -> Tensor:
    """Return the plain alias of a shard, with its graph."""
    if not isinstance(tensor, ShardTensor):
        return tensor
    with without_function_subclasses():
        return tensor.as_subclass(Tensor)


@functools.cache
def shard_class(plain: type[Tensor]) -> type[Tensor]:
    """Return the guarded class for tensors of a plain class."""
    members = {_PLAIN: plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (ShardTensor, plain), members)


@functools.cache
def whole_class(plain: type[Tensor]) -> type[Tensor]:
    """Return the class of a tensor whose values are whole and whose gradient is not."""
    members: dict[str, Any] = {
        _PLAIN: plain,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "detach": _detach_whole,
        "grad": property(read_gradient, write_gradient, lambda tensor: write_gradient(tensor, None)),
        "__deepcopy__": _copy_as_plain,
        "__reduce_ex__": _pickle_as_plain,
        "__torch_function__": nn.Parameter.__torch_function__,  # what is computed of one is plain; of a buffer, too
    }
    return type(plain.__name__, (plain,), members)


def _detach_whole(self: Tensor) -> Tensor:
    _refuse_new_parameter(self, sys._getframe(1))
    return Tensor.detach(self)


def _refuse_new_parameter(tensor: Tensor, caller: FrameType) -> None:
    """Refuse `nn.Parameter(parameter)`, which torch refuses for such classes in words that name no cause."""
    if caller.f_code is nn.Parameter.__new__.__code__:
        facts = facts_of(tensor)
        raise ApplyError(
            f"nn.Parameter() of {facts.name} makes a parameter that nothing trains under the plan '{facts.moment.plan}', which "
            "has laid out the parameters already: a parametrization that is registered later makes such ones",
            fix="register parametrizations before apply_plan; copy values as nn.Parameter(parameter.detach().clone()), inside "
            "`with model.whole_parameters():`",
        )


def _as_plain_class(tensor: Tensor, run: Callable[[], Any]) -> Any:
    now, facts = type(tensor), vars(tensor).pop(_FACTS)
    tensor.__class__ = getattr(now, _PLAIN)
    try:
        return run()
    finally:
        tensor.__class__ = now
        vars(tensor)[_FACTS] = facts


def _copy_as_plain(self: Tensor, memo: dict[int, Any]) -> Any:
    made = _as_plain_class(self, lambda: copy.deepcopy(self, memo))
    return made if isinstance(made, nn.Parameter) else made.detach()


def _pickle_as_plain(self: Tensor, protocol: Any) -> Any:
    return _as_plain_class(self, lambda: self.__reduce_ex__(protocol))


def read_gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a parameter in the form that user code may use."""
    facts = facts_of(tensor)
    with without_function_subclasses():
        gradient = _GRAD.__get__(tensor)
        if gradient is not None:
            return as_shard(gradient, facts.of_gradient()) if facts.is_cut or facts.values != "whole" else gradient
        is_elsewhere = facts.gradient_is_elsewhere is not None and facts.gradient_is_elsewhere()
        if not is_elsewhere or facts.cleared_in == facts.moment.steps:
            return None
        nothing = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return as_shard(nothing, facts.of_absent_gradient())


def write_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Accept a gradient that user code has set; a plain one is not known to be this rank's part."""
    facts = facts_of(tensor)
    if gradient is None:
        facts.cleared_in = facts.moment.steps
    elif not isinstance(gradient, ShardTensor) or facts_of(gradient).values == "none":
        facts.refuse("an assignment to .grad", writes=True)
    with without_function_subclasses():
        _GRAD.__set__(tensor, gradient if gradient is None else gradient.as_subclass(Tensor))


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1


class _ShardCall:
    """One call of a torch function with a shard among its arguments."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.full_name = rules.name_of(func)
        self.name = rules.plain_name(self.full_name)
        self.writes = rules.writes_in_place(self.full_name)
        self.tensors = list(arguments_in((args, kwargs)))
        self.shards = [tensor for tensor in self.tensors if isinstance(tensor, ShardTensor)]
        self.facts = facts_of(self.shards[0])

    def run(self) -> Any:
        if self.full_name.endswith((".get", ".set", ".delete")):
            return self._property()
        if self.full_name in rules.FACTS:
            return self._plain()
        if self.full_name.startswith("_foreach_"):
            return self._foreach()
        facts = self.facts
        if any(facts_of(shard).values == "share" for shard in self.shards):
            return self._wrapped(self._plain()) if self._is_linear() else self._refuse()
        if self._is_done_elsewhere():
            return self._on_stand_in()
        if self.name not in rules.ELEMENTWISE or (
            self.name == "where" and len(self.args) < len(("if", "then", "else"))
        ):
            self._refuse()
        self._require_alike(self.tensors)
        if facts.values == "none":
            return self._without_values()
        return self._wrapped(self._plain())

    def _plain(self) -> Any:
        with without_function_subclasses():
            return self.func(*self.args, **self.kwargs)

    def _refuse(self) -> NoReturn:
        self.facts.refuse(f"{self.full_name}()", writes=self.writes)

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            if any(result is tensor for tensor in self.tensors):
                return result
            if self.name in rules.LOOKS and self.facts.values == "share":
                return as_plain(result)
            return as_shard(result, self.facts)
        return type(result)(map(self._wrapped, result)) if isinstance(result, (list, tuple)) else result

    def _property(self) -> Any:
        name, kind = self.full_name.rsplit(".", 1)
        first = self.args[0]
        if name == "grad":
            if kind == "get":
                return read_gradient(first)
            return write_gradient(first, self.args[1] if kind == "set" else None)
        if name == "data" and kind == "set":
            value = self.args[1]
            with without_function_subclasses():
                return self.func(first, as_plain(value) if isinstance(value, Tensor) else value)
        if self.full_name == "data.get":
            return as_shard(self._plain(), self.facts)
        if self.full_name in rules.VIEWS_OF_VALUES:
            self.facts.refuse(f".{name}")
        return self._plain()

    def _require_alike(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to mix a shard with anything but numbers and shards of the same entries."""
        for tensor in tensors:
            if isinstance(tensor, ShardTensor):
                if facts_of(tensor).key != self.facts.key:
                    self.facts.refuse(f"{self.full_name}() together with {facts_of(tensor).name}")
            elif not _is_number(tensor):
                what = f"{self.full_name}() with a tensor of shape {tuple(tensor.shape)}"
                into_shard = self.writes and isinstance(tensors[0], ShardTensor)
                if self.writes and not into_shard:
                    what = f"{self.full_name}() into a tensor of shape {tuple(tensors[0].shape)}"
                self.facts.refuse(what, writes=into_shard)

    def _is_done_elsewhere(self) -> bool:
        """Whether ranks that have the tensor whole get the same call, with arguments that they have too."""
        facts = self.facts
        is_theirs = facts.elsewhere == "whole" and facts.moment.where == "between"
        return is_theirs and self.writes and len(self.shards) == 1 and self.tensors[0] is self.shards[0]

    def _on_stand_in(self) -> Any:
        """Write into a tensor that is never read, so that errors and random draws are the same on all ranks."""
        first = self.shards[0]
        with without_function_subclasses(), torch.no_grad():
            blank = torch.zeros(first.shape, dtype=first.dtype, device=first.device)
            named = {key: blank if item is first else item for key, item in self.kwargs.items()}
            self.func(*(blank if item is first else item for item in self.args), **named)
        return first

    def _without_values(self) -> Any:
        if not self.writes:
            return as_shard(self._on_one_entry(), self.facts)
        may_pass = (
            self.name == "zero"
            and self.facts.gradient_is_elsewhere is not None
            and self.facts.moment.where == "between"
        )
        if may_pass and self.facts.moment.has_own_gradients:
            raise ApplyError(
                f"{self.full_name}() of {self.facts.name} would leave the ranks' pieces of it as they are, and the next "
                "model.backward() would add to them",
                fix="call model.zero_grad() or model.optimizer.zero_grad()",
            )
        if self.facts.ignores_writes or may_pass:
            return self.args[0]
        return self._refuse()

    def _on_one_entry(self) -> Tensor:
        """Return what stands for the result of a function of values that are elsewhere: of one entry's memory.

        A function that changes no value gives its argument back. Any other one gives new memory, in which an assignment to
        `.data` is seen.
        """
        first = as_plain(self.shards[0])
        if self.name in rules.COPIES:
            return first
        with without_function_subclasses():
            ones = {id(s): s.as_subclass(Tensor).as_strided((1,) * s.dim(), (0,) * s.dim()) for s in self.shards}
            args, kwargs = map_tensors((self.args, self.kwargs), lambda tensor: ones.get(id(tensor), tensor))
            found = self.func(*args, **kwargs)
            return first if any(found is one for one in ones.values()) else found.expand(first.shape)

    def _foreach(self) -> Any:
        """Run a function over lists, whose entries at one index belong together."""
        if self.name not in rules.ELEMENTWISE or any(facts_of(shard).values == "share" for shard in self.shards):
            self._refuse()
        count = len(self.args[0])
        lists = [item for item in (*self.args, *self.kwargs.values()) if isinstance(item, (list, tuple))]
        places = [[item[place] for item in lists if len(item) == count] for place in range(count)]
        kept: list[int] = []
        owners: list[ShardFacts | None] = []
        for place, group in enumerate(places):
            shard = next((item for item in group if isinstance(item, ShardTensor)), None)
            owners.append(None if shard is None else facts_of(shard))
            if shard is None:
                kept.append(place)
                continue
            self.facts = facts_of(shard)
            self._require_alike([item for item in group if isinstance(item, Tensor)])
            if self.facts.values != "none":
                kept.append(place)
            elif not (self.writes and self.facts.ignores_writes):
                self._refuse()

        def chosen(item: Any) -> Any:
            is_list = isinstance(item, (list, tuple)) and len(item) == count
            return [item[place] for place in kept] if is_list else item

        with without_function_subclasses():
            result = self.func(*map(chosen, self.args), **{key: chosen(item) for key, item in self.kwargs.items()})
        if not isinstance(result, (list, tuple)) or self.writes:
            return result
        facts = [owners[place] for place in kept]
        return [item if own is None else as_shard(item, own) for item, own in zip(result, facts, strict=True)]

    def _is_linear(self) -> bool:
        """Tell whether the function's results, summed over all terms, are its result on their sum."""
        shares = [s for s in self.shards if facts_of(s).values == "share"]
        others = [t for t in self.tensors if not isinstance(t, ShardTensor)]
        is_cut = any(facts_of(share).is_cut for share in shares)
        if len(shares) != len(self.shards) or (is_cut and not all(map(_is_number, others))):
            return False
        if self.name in rules.MAPS or self.name in rules.LOOKS:
            return True
        if self.name in ("add", "sub", "subtract", "rsub"):
            numbers = [item for item in self.args if not isinstance(item, Tensor)]
            return not others and not any(numbers)
        if self.name in ("mul", "multiply"):
            return len(shares) == 1
        if self.name in ("div", "divide", "truediv", "true_divide"):
            return len(shares) == 1 and self.args[0] is shares[0] and not self.full_name.startswith("__r")
        if self.name == "masked_fill":
            return (
                self.args[0] is shares[0]
                and not any(isinstance(item, Tensor) for item in self.args[2:])
                and not self.args[2]
            )
        if self.name == "setitem":
            value = self.args[2]
            return (
                not is_cut
                and (value is shares[-1] or not isinstance(value, Tensor))
                and (value is shares[-1] or not value)
            )
        return self.name in ("neg", "negative", "pos") or (
            not is_cut and self.name in rules.MAPS_OF_WHOLE and len(shares) == 1
        )
