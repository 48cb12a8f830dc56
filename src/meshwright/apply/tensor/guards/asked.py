"""Sizes and values that a part's code reads from its tensors, beyond computing with them. They limit what its proof covers.

*Sizes.* Sizes of arguments are followed into every number that derives from them. `asked_sizes.py` notices where code uses such a
number for anything but the size of a tensor. Runs with one size changed show which inner sizes derive from it: those that change;
heads, their width or a vocabulary do not. A size counts as read if it cannot be changed alone, or if changing it changes the
called functions. So it does where a translation of sizes to shards' goes by a number that derives from it (`sizes.py`): a length
that is a width by chance would be translated as one.

*Values.* Reads by code (`item()`, `bool()`, `int()`) are followed for arguments without gradient, for buffers, and for tensors
computed from those alone: a flag, a counter, a mask's `all()`. Tensors made from sizes alone (`arange(x.shape[1])`) count as
sizes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright._torch_dispatch import draws_untouched
from meshwright.apply.modules.copies import map_call
from meshwright.apply.tensor.guards.asked_shapes import are_worth_it, without_numbers
from meshwright.apply.tensor.guards.asked_sizes import AskedSize, origins_in, plain_sizes
from meshwright.apply.tensor.sizes import numbers_compared
from meshwright.apply.tensor.types.typed_run import READS, is_torchs_own, name_of
from meshwright.trees import tensors_in

__all__: list[str] = []

_SIZES = {
    torch.Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.numel,
}
_READS = READS | {"format"}
_CONSTANT = frozenset(["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"])
_DRAWN = frozenset(["rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "empty"])
_MAX_SIZES = 6
"""Sizes of arguments that are told apart [count]; where there are more, all of them count."""

Event = tuple[Any, tuple[int, ...]]
Run = Callable[[nn.Module, Any, TorchFunctionMode], list[Tensor]]


class _Watched(TorchFunctionMode):
    """Records each function called inside the context, and the sizes and counts that it returns.

    Args:
        resized: Sizes of the arguments, where sizes that code gives are translated to shards' (`sizes.py`): before such a call
            the numbers are recorded by which it is translated. None where nothing is.
    """

    def __init__(self, resized: Collection[int] | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._resized = resized

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._resized is not None:
            numbers = numbers_compared(func, args, kwargs or {}, self._resized)
            self.events += [(numbers_compared, tuple(numbers))] if numbers else []
        result = func(*args, **(kwargs or {}))
        self.events.append((func, _sizes_given(func, result)))
        return result


def _sizes_given(func: Callable[..., Any], result: Any) -> tuple[int, ...]:
    if func in _SIZES:
        return tuple(result) if isinstance(result, tuple) else (result,)
    if func is torch.Tensor.__len__:
        return (result,)
    return (len(result),) if isinstance(result, (tuple, list)) else ()


class Asked(_Watched):
    """Records the sizes and values that code reads inside the context.

    Args:
        module: The module that runs.
        arguments: Its arguments.
        origins: For each called function, and each size that it returns, the argument sizes from which that derives; None where
            that is not known, and equal sizes are taken for the same.
        expected: The functions that are called.
        resizes: Whether sizes are translated to shards'.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Any,
        *,
        origins: list[list[frozenset[int]]] | None,
        expected: list[Event],
        resizes: bool = False,
    ) -> None:
        super().__init__(sizes_of(arguments) if resizes else None)
        self.sizes: set[int] = set()
        """The sizes of arguments whose value it has taken."""
        self.values = 0
        """Whose numbers it has read: 1 is of arguments and buffers, 2 also of tensors in attributes."""
        self.is_same = True
        """Whether it gave the same as where gradients are on."""
        self.followed: Followed | None = None
        """What other runs have shown of its sizes."""
        self._given = sizes_of(arguments)
        self._origins = origins
        self._expected = expected
        self._arguments = {id(tensor) for tensor in tensors_in(arguments)}
        kept = [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
        plain = [tensor for tensor in tensors_in(arguments) if not tensor.requires_grad]
        self._alive = [*kept, *plain, *module.buffers()]
        nowhere: frozenset[int] = frozenset()
        self._followed = {
            id(tensor): (nowhere, 2 if place < len(kept) else 1) for place, tensor in enumerate(self._alive)
        }
        """By id: the sizes that a tensor's numbers follow from, and whose numbers, as in `values`."""

    def ask_for_all(self) -> None:
        """Count every size and value as read, since nothing is known."""
        self.sizes |= self._given
        self.values = 2

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args, kwargs or {}
        args, kwargs = plain_sizes(args), plain_sizes(kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        is_read = name_of(func) in _READS and not any(True for _ in tensors_in(result))
        if is_read and args and (followed := self._followed.get(id(args[0]))) is not None:
            self.sizes |= followed[0]
            self.values = max(self.values, followed[1])
        self._follow(func, given, result)
        origins = self._origins_of_last()
        if func in _SIZES:
            return self._marked(result, origins, is_own=bool(args) and id(args[0]) in self._arguments)
        if any(origins) and not (func is torch.Tensor.__len__ and is_torchs_own(_caller(sys._getframe(1)))):
            self.sizes |= frozenset().union(*origins)  # a plain int by Python's own rule, or as many results
        return result

    def _origins_of_last(self) -> list[frozenset[int]]:
        """Return the origins of each size that the last function returned."""
        place = len(self.events) - 1
        func, sizes = self.events[place]
        if self._origins is None:
            return [frozenset({size} & self._given) for size in sizes]
        if place >= len(self._expected) or self._expected[place][0] != func:
            self.ask_for_all()
            return [frozenset() for _ in sizes]
        return self._origins[place]

    def _marked(self, result: Any, origins: list[frozenset[int]], *, is_own: bool) -> Any:
        def mark(size: int, origin: frozenset[int]) -> Any:
            return AskedSize(size, origin, self.sizes.update, is_own=is_own) if origin else size

        if not isinstance(result, tuple):
            return mark(result, origins[0])
        return type(result)([mark(*pair) for pair in zip(result, origins, strict=True)])

    def _follow(self, func: Callable[..., Any], given: Any, result: Any) -> None:
        """Follow tensors computed from followed tensors, or from sizes, alone."""
        name = name_of(func)
        tensors = list(tensors_in(given))
        if name.removesuffix("_like") in _DRAWN:
            return
        if name in _CONSTANT:
            like = {size for tensor in tensors for size in tensor.shape} if name.endswith("_like") else set[int]()
            told = [(frozenset(like & self._given), 0)]
        else:
            told = [self._followed[id(tensor)] for tensor in tensors if id(tensor) in self._followed]
            if len(told) < len(tensors):
                return
        origins = origins_in(given).union(*(sizes for sizes, _ in told))
        for tensor in tensors_in(result):
            self._alive.append(tensor)  # an id identifies a tensor only while the tensor lives
            self._followed[id(tensor)] = origins, max([0, *(values for _, values in told)])


@dataclasses.dataclass(frozen=True)
class Followed:
    """What runs of a call with other numbers and other sizes have shown."""

    expected: list[Event]
    """The called functions, and the sizes that they give."""
    counts: set[int]
    """Argument sizes that count as read in any case."""
    origins: list[list[frozenset[int]]] | None
    """The argument sizes that each inner size derives from; None where the called functions depend on values."""


def ask(
    run: Run,
    fresh: Callable[[], tuple[nn.Module, Any]],
    earlier: Followed | None = None,
    *,
    resizes: bool = False,
    expected: list[Event] | None = None,
) -> Asked:
    """Return the sizes and values that the code of a call reads.

    Args:
        run: Runs a module with its (args, kwargs) inside a mode, and returns its tensors.
        fresh: Returns a copy of the module, and of its arguments.
        earlier: What such runs have shown in another mode. It holds where the same functions give the same sizes.
        resizes: Whether sizes that the code gives are translated to shards'. Then those count that decide how.
        expected: What such a run has called, where that is known.
    """
    module, inputs = fresh()
    expected = expected or _events(run, *fresh(), resizes=resizes) or []
    followed = _follow_sizes(run, fresh, earlier, expected, resizes=resizes)
    asked = Asked(module, inputs, origins=followed.origins, expected=followed.expected, resizes=resizes)
    try:
        run(module, inputs, asked)
    except Exception:  # noqa: BLE001 - whatever code raises that takes a size for an int
        asked.ask_for_all()
    asked.sizes |= followed.counts
    asked.followed = followed
    return asked


def _follow_sizes(
    run: Run,
    fresh: Callable[[], tuple[nn.Module, Any]],
    earlier: Followed | None,
    expected: list[Event],
    *,
    resizes: bool,
) -> Followed:
    if earlier is not None and expected and expected == earlier.expected:
        return earlier
    module, inputs = fresh()
    own = sorted(size for size in sizes_of(inputs) if size > 1)
    drawn = _events(run, module, map_call(inputs, _other_numbers), resizes=resizes)
    if drawn is None or [func for func, _ in drawn] != [func for func, _ in expected]:
        return Followed(expected, set(own) if resizes else set(), None)
    found: list[list[frozenset[int]]] = [[frozenset() for _ in sizes] for _, sizes in expected]
    counts: set[int] = set()
    for size in own if len(own) <= _MAX_SIZES else []:
        changed = _with_another(run, fresh, size, expected, resizes=resizes)
        if changed is None or [func for func, _ in changed] != [func for func, _ in expected]:
            counts.add(size)
            continue
        if any(one != two for one, two in zip(expected, changed, strict=True) if one[0] is numbers_compared):
            counts.add(size)
        for place, ((_, mine), (_, other), (_, noise)) in enumerate(zip(expected, changed, drawn, strict=True)):
            for index, triple in enumerate(zip(mine, other, noise, strict=False)):
                if triple[0] != triple[1] and triple[0] == triple[2]:
                    found[place][index] |= {size}
    return Followed(expected, counts if len(own) <= _MAX_SIZES else set(own), found)


def calls_the_same(run: Run, *calls: tuple[Callable[[], tuple[nn.Module, Any]], list[Event]]) -> bool:
    """Tell whether calls come to their end with the same functions, each given as (as for `ask`, its events or nothing)."""
    events = [known or _events(run, *fresh()) for fresh, known in calls]
    return None not in events and len({tuple([func for func, _ in own or ()]) for own in events}) == 1


def run_and_note(module: nn.Module, inputs: Any) -> tuple[Any, list[Event]]:
    """Run a module; return its results, and the functions that it calls with the sizes that they give."""
    with _Watched() as watched:
        return module(*inputs[0], **inputs[1]), watched.events


def _with_another(
    run: Run, fresh: Callable[[], tuple[nn.Module, Any]], size: int, expected: list[Event], *, resizes: bool
) -> list[Event] | None:
    """Return the functions called with one argument size changed: twice as large, or else smaller by one.

    Of large tensors the shapes alone are computed, where the same functions are called so.
    """
    for other in (2 * size, size - 1):
        module, inputs = fresh()

        def resize(tensor: Tensor, other: int = other) -> Tensor:
            return _resized(tensor, size, other)

        if are_worth_it(inputs):
            events = _events_of_shapes(run, module, map_call(inputs, resize), resizes=resizes)
            if events is not None and [func for func, _ in events] == [func for func, _ in expected]:
                return events
        events = _events(run, module, map_call(inputs, resize), resizes=resizes)
        if events is not None:
            return events
    return None


def _events_of_shapes(run: Run, module: nn.Module, inputs: Any, *, resizes: bool) -> list[Event] | None:
    try:
        return _events(run, *without_numbers(module, inputs), resizes=resizes)
    except Exception:  # noqa: BLE001 - whatever a tensor or an object raises that has no copy without numbers
        return None


def _events(run: Run, module: nn.Module, inputs: Any, *, resizes: bool = False) -> list[Event] | None:
    watched = _Watched(sizes_of(inputs) if resizes else None)
    try:
        run(module, inputs, watched)
    except Exception:  # noqa: BLE001 - whatever code raises for a size that it is not made for
        return None
    return watched.events


def _resized(tensor: Tensor, size: int, other: int) -> Tensor:
    rows = torch.arange(other) % size
    for dim, have in enumerate(tensor.shape):
        if have == size:
            tensor = tensor.detach().index_select(dim, rows).requires_grad_(tensor.requires_grad)
    return tensor


def _other_numbers(tensor: Tensor) -> Tensor:
    """Return another activation; masks and ids stay."""
    if not tensor.requires_grad:
        return tensor
    generator = torch.Generator().manual_seed(tensor.numel())
    with draws_untouched():
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).requires_grad_()


def sizes_of(arguments: Any) -> set[int]:
    """Return the sizes of all dims of tensors."""
    return {size for tensor in tensors_in(arguments) for size in tensor.shape}


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called a method of torch.Tensor which is written in Python."""
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_tensor.py", "torch/overrides.py")):
        frame = frame.f_back
    return frame
