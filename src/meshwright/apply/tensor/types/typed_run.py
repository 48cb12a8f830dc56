"""Record of the whole run's calls in order. Shards run the same code, so their k-th call must be the same."""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.types.lattice import NOWHERE, RefusedError, Where
from meshwright.trees import arguments_in, tensors_in

__all__: list[str] = []

_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_CALLS = os.path.join(_MODULES, "module.py")
_OURS = os.sep.join(__file__.split(os.sep)[:-4]) + os.sep
_START = "run_and_watch"
"""Name of the functions that start a run: nothing above them is the user's forward."""

READS = frozenset(
    "bool item int float tolist numpy index complex contains is_nonzero equal allclose array".split()  # noqa: SIM905
)
"""Names of functions that give code a number or a truth value, where they give no tensor."""

SIZES = frozenset(["shape", "size", "numel", "nelement", "len", "nbytes"])
"""Names of functions that give code the size of a tensor, which a shard has another of."""

_PAIRS = ("add", "sub", "mul", "and", "or", "xor", "floordiv", "mod", "matmul", "lshift", "rshift")


def name_of(func: Callable[..., Any]) -> str:
    """Return the plain name of a torch function: `add` for `+`, `+=` and `add_`.

    >>> name_of(torch.Tensor.add_), name_of(torch.Tensor.__iadd__), name_of(torch.Tensor.T.__get__)
    ('add', 'add', 'T')
    """
    name = getattr(func, "__name__", "") or str(func)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    plain = name.strip("_")
    if name.startswith("__") and plain[:1] in ("i", "r") and plain[1:] in _PAIRS:
        return plain[1:]
    return {"truediv": "div", "itruediv": "div", "idiv": "div", "ipow": "pow"}.get(plain, plain)


def find_where() -> tuple[Where, bool]:
    """Return the running line of the user's code, and whether our own code makes the call instead.

    Calls of torch's own modules count as the user's, since they are modules of the user's model.
    """
    frame: FrameType | None = sys._getframe(1)
    inner: Where | None = None
    is_own = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code.co_name == _START:
            break
        if code.co_name != "__torch_function__" and "/apply/tensor/types/" not in file:
            if file == _CALLS:
                pass  # a module's call takes one of several lines, with hooks and without
            elif file.startswith(_MODULES):
                inner = inner or Where(file, frame.f_lineno)
            elif file.startswith(_OURS):
                is_own = is_own or inner is None
            elif not file.startswith(_TORCH):
                return Where(file, frame.f_lineno), is_own
        frame = frame.f_back
    return inner or NOWHERE, is_own


def is_torchs_own(frame: FrameType | None) -> bool:
    """Tell whether torch code outside any module asks; such code works for every size."""
    while frame is not None and "/apply/tensor/types/" in frame.f_code.co_filename:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(_TORCH) and not file.startswith(_MODULES)


@dataclasses.dataclass(slots=True)
class Event:
    """One call of a torch function, or the entry or exit of a module."""

    name: str
    where: Where = NOWHERE
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list[tuple[int, ...]])
    """Of the tensors that it gave."""
    integers: dict[int | str, int] = dataclasses.field(default_factory=dict[int | str, int])
    """Arguments that are integers."""
    module: str | None = None


class Record:
    """All calls of a run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.constants: dict[int, Tensor] = {}
        """By id, the tensors that functions took and no function had made: what the code holds from before."""


class Follower:
    """A reader of a record."""

    def __init__(self, record: Record) -> None:
        self._events = record.events
        self._next = 0

    def call(self, name: str, where: Where) -> Event:
        """Return the whole run's call that matches this one; refuse one that calls something else here."""
        while self._next < len(self._events) and self._events[self._next].module is not None:
            self._next += 1
        found = self._events[self._next] if self._next < len(self._events) else Event("nothing")
        if found.name != name or found.where != where:
            raise RefusedError(f"takes another path on shards: the whole calls {found.name} at {found.where} instead")
        self._next += 1
        return found

    def finish(self) -> None:
        """Refuse a run that ends before the whole one does."""
        rest = [event for event in self._events[self._next :] if event.module is None]
        if rest:
            raise RefusedError(f"takes another path on shards: the whole also calls {rest[0].name} at {rest[0].where}")

    def pass_module(self, path: str) -> list[tuple[int, ...]]:
        """Skip a module's call, and return the shapes of its results; refuse one that the whole run does not make here."""
        depth = 0
        for index in range(self._next, len(self._events)):
            event = self._events[index]
            if event.module == path:
                depth += 1 if event.name == "enter" else -1
                if depth == 0:
                    self._next = index + 1
                    return event.shapes
            elif depth == 0 and event.module is None:
                break
        raise RefusedError(f"takes another path on shards: the whole does not call '{path}' here")


class Recorder(TorchFunctionMode):
    """Records the calls of a run."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in arguments_in((args, kwargs)):
            if (made := self._made.get(id(tensor))) is None or made() is not tensor:
                self._record.constants[id(tensor)] = tensor
        result = func(*args, **kwargs)
        name = name_of(func)
        outputs = list(arguments_in(result))
        self._made.update((id(tensor), weakref.ref(tensor)) for tensor in outputs)
        if outputs or name == "setitem":
            where, is_own = find_where()
            if is_own:  # recompute: torch.utils.checkpoint calls `empty` on 2.11; shards look up no call of ours
                return result
            integers: dict[int | str, int] = {
                key: value for key, value in (*enumerate(args), *kwargs.items()) if type(value) is int
            }
            self._record.events.append(Event(name, where, [tuple(t.shape) for t in outputs], integers))
        return result


def run_and_watch(module: nn.Module, inputs: Any, record: Record) -> Any:
    """Run a module, record its calls and return its results."""
    handles: list[Any] = []
    for path, child in module.named_modules():

        def enter(_: Any, __: Any, path: str = path) -> None:
            record.events.append(Event("enter", module=path))

        def leave(_: Any, __: Any, outputs: Any, path: str = path) -> None:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(outputs)]
            record.events.append(Event("leave", shapes=shapes, module=path))

        handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave)]
    try:
        with Recorder(record):
            return module(*inputs[0], **inputs[1])
    finally:
        for handle in handles:
            handle.remove()
