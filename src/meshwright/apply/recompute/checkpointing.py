"""Recompute (activation checkpointing): a layer keeps its inputs and repeats its forward when its backward begins.

Chen et al. 2016, arXiv:1604.06174; selective recompute follows Korthikanti et al. 2022, arXiv:2205.05198. It keeps the results of
matrix products and convolutions, which are expensive, and repeats the rest. Layers that write over such results in place
(recurrent ones, `inplace=True`) are repeated in full. Torch's own non-reentrant checkpoint does the work; it restores the random
generators, so that dropout draws the same mask.

The repetition starts from the layer's buffers and attributes before the first forward, and leaves no trace. So running
statistics, power iterations, counters and tensors kept for the loss are those of one forward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from meshwright._torch_private import DEAR_OPERATORS
from meshwright._torch_texts import says_no_saved_hooks
from meshwright.apply.finding import Finding
from meshwright.apply.modules.forwards import with_forward
from meshwright.apply.randomness.python_seeding import seeds_again, seeds_from_here
from meshwright.apply.recompute.foreign_writes import names_of_forward
from meshwright.apply.recompute.held_arguments import checkpoint_closed, hold_arguments
from meshwright.apply.recompute.inputs import Inputs, Writers
from meshwright.apply.recompute.kept import UnseenWrites, keeping_contexts
from meshwright.apply.recompute.repetition import Repetition
from meshwright.apply.state.attributes import Attributes, Moment
from meshwright.apply.state.outside import Elsewhere, Outside
from meshwright.comm.ledger import Ledger
from meshwright.describe.layers import find_layers
from meshwright.errors import ApplyError
from meshwright.python_state import PythonState

__all__: list[str] = []

# For a class with a repeated forward: its original class, and the function that makes it from that.
_MADE_OF = "_meshwright_made_of"


class Recompute:
    """The layers of a module that run again in backward.

    Args:
        module: The user's module.
        kind: "full" or "selective".
    """

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.before: Callable[[nn.Module], None] | None = None
        """Called with a layer before its forward runs, again too; a strategy that shards makes its values whole then."""
        self.ledger = Ledger()
        """Records repeated forwards, where steps are traced."""
        self.writers = Writers()
        """The layers that write over their inputs."""
        self._inspected: nn.Module | None = None
        self._findings: list[Finding] = []
        pieces = [layer for _, layer in find_layers(module)]
        # A lone Linear, norm or activation saves only its input anyway, so it is repeated only in models without larger layers.
        layers = [layer for layer in pieces if any(True for _ in layer.children())] or pieces
        self._attributes: weakref.WeakKeyDictionary[nn.Module, Attributes] = weakref.WeakKeyDictionary()
        self._outside: weakref.WeakKeyDictionary[nn.Module, Outside | None] = weakref.WeakKeyDictionary()
        self._unseen_writes: weakref.WeakKeyDictionary[nn.Module, UnseenWrites] = weakref.WeakKeyDictionary()
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []
        self._names = {id(layer): name for name, layer in module.named_modules()}
        for layer in layers:
            keeps = kind == "selective" and not _writes_in_place(layer)
            self._changed.append((layer, type(layer)))
            layer.__class__ = _recomputed(type(layer), self, keeps=keeps)

    def attributes_of(self, layer: nn.Module) -> Attributes:
        """Return the state that a forward may change on a layer, or on a copy of one."""
        found = self._attributes.get(layer)
        if found is None:
            found = self._attributes[layer] = Attributes(layer)
        return found

    def outside_of(self, layer: nn.Module) -> Outside | None:
        """Return the state that a layer's code keeps elsewhere; None, the usual case, where it keeps and draws nothing there."""
        if layer not in self._outside:
            found = Outside(layer)
            self._unseen_writes[layer] = UnseenWrites(names_of_forward(found.functions))
            self._outside[layer] = None if found.is_empty and not found.draws else found
        return self._outside[layer]

    def may_write_unseen(self, layer: nn.Module) -> bool:
        """Tell whether a layer's code may write over tensors in a way that no version shows."""
        writes = self._unseen_writes[layer]
        return writes.are_there or writes.are_foreign

    def contexts_of(self, layer: nn.Module, *, sees_all: bool) -> dict[str, Callable[[], Any]]:
        """Return what checkpoint is told so that a layer keeps expensive results; nothing where it cannot."""
        writes = self._unseen_writes[layer]
        if writes.are_foreign:
            return {}
        return {"context_fn": functools.partial(keeping_contexts, writes, sees_all=sees_all)}

    def begin_inspection(self, number: int) -> None:
        """Start comparing one layer's repeated results with its first ones; layers take turns.

        Args:
            number: Inspections before this one [count].
        """
        self._inspected = self._changed[number % len(self._changed)][0] if self._changed else None

    def end_inspection(self) -> list[Finding]:
        """Return the differences."""
        self._inspected = None
        found, self._findings = self._findings, []
        return found

    def look_at(self, layer: nn.Module) -> Repetition | None:
        """Return the comparison for a layer that begins a forward; None where it is not its turn."""
        if layer is not self._inspected:
            return None
        self._inspected = None  # its first call in the step only, to keep the results of one call
        return Repetition(self._names.get(id(layer), ""), self._findings)

    def recorded(self, layer: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time is recorded as a repeated forward, where steps are traced."""
        if self.ledger.recorder is None:
            return self.ledger.span("recompute", "")
        return self.ledger.span("recompute", self._names.get(id(layer)) or type(layer).__name__)

    def close(self) -> None:
        """Restore the layers' own classes."""
        for layer, original in self._changed:
            layer.__class__ = original


def _writes_in_place(layer: nn.Module) -> bool:
    """Tell whether a layer is known to write over results that selective recompute keeps; it is then repeated in full."""
    return any(isinstance(child, nn.RNNBase) or getattr(child, "inplace", False) for child in layer.modules())


def _contexts_of_torch() -> Any:
    """Return torch's contexts for selective recompute under torch.compile, whose compiler knows no others."""

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in DEAR_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recomputed(original: type[nn.Module], owner: Recompute, *, keeps: bool) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(_run, original, owner, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch.compile handles side effects and writes itself
            options = {"context_fn": _contexts_of_torch} if keeps else {}
            return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
        _under_way.owners.append(owner)
        try:
            return _run_twice(owner, self, run, args, kwargs, keeps=keeps)
        finally:
            _under_way.owners.pop()

    recomputed = with_forward(original, forward, is_whole=True)
    setattr(recomputed, _MADE_OF, (original, functools.partial(_recomputed, owner=owner, keeps=keeps)))
    return recomputed


def _run_twice(
    owner: Recompute, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, *, keeps: bool
) -> Any:
    """Run a layer's forward, which backward repeats, but for the results that it keeps."""
    outside = owner.outside_of(layer)
    inputs = owner.writers.begin(layer, args, kwargs, may_write_unseen=owner.may_write_unseen(layer))
    kept_args, kept_kwargs = inputs.kept
    inspection = owner.look_at(layer)
    options = owner.contexts_of(layer, sees_all=inspection is not None) if keeps else {}
    state = owner.attributes_of(layer), outside
    again = functools.partial(owner.recorded, layer)
    twice = _Twice(run, state, inputs, type(layer).__name__, inspection=inspection, again=again)
    # Otherwise the repetition stops at the last tensor that backward needs, before the results exist.
    with contextlib.nullcontext() if inspection is None else set_checkpoint_early_stop(enable=False):
        function, arguments = hold_arguments(twice, kept_args)
        try:
            result = checkpoint_closed(function, *arguments, **options, **kept_kwargs)
        except RuntimeError as error:
            if not says_no_saved_hooks(error):
                raise
            raise ApplyError(
                f"{type(layer).__name__} computes derivatives with torch.func (grad, vjp, jacrev), which torch does not allow in "
                "a forward that backward repeats",
                fix="use recompute=none, or torch.autograd.grad with create_graph=True",
            ) from error
    owner.writers.end(layer, inputs, type(layer).__name__)
    return result


class _LayersUnderWay(threading.local):
    """Stack of this thread's repeated layers whose forward is running, outermost first, each with its `Recompute`."""

    def __init__(self) -> None:
        self.owners: list[Recompute] = []


_under_way = _LayersUnderWay()


def checkpoint_inside(run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module inside a checkpoint that cannot repeat the whole of its code: the module is repeated alone.

    If the checkpoint is the user's, the repetition leaves traces, as on one device. If it is a repeated layer of ours, it leaves
    none.
    """
    if not _under_way.owners:
        function, arguments = hold_arguments(run, (module, *args))
        return checkpoint(function, *arguments, use_reentrant=False, **kwargs)
    return _run_twice(_under_way.owners[-1], module, functools.partial(run, module), args, kwargs, keeps=False)


def with_repeated_forward(module: nn.Module, make: Callable[[nn.Module], Callable[..., Any]]) -> type[nn.Module]:
    """Return a subclass for a module, whose forward `make` builds from the forward of the module's class at each call.

    If the module is repeated in backward, this forward is repeated with it: what it hides or changes during the call is hidden
    then, too.
    """
    present = type(module)
    if _MADE_OF not in vars(present):
        return with_forward(present, make(module))
    original, repeat = vars(present)[_MADE_OF]
    module.__class__ = original
    try:
        return repeat(with_forward(original, make(module)))
    finally:
        module.__class__ = present


class _Twice:
    """A forward, and its repetition in backward from the layer's earlier state.

    Args:
        run: The forward.
        state: The state that it may change on its layer, and elsewhere.
        inputs: Its inputs, which it may write over.
        name: The class of the layer, for messages.
        inspection: Compares the results of both runs; None without an inspection.
        again: Makes the context that the repetition runs in.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        state: tuple[Attributes, Outside | None],
        inputs: Inputs,
        name: str,
        *,
        inspection: Repetition | None,
        again: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self._again = again
        self._name = name
        self._run = run
        self._attributes, self._outside = state
        self._inputs = inputs
        self._before: Moment | None = None
        self._elsewhere: tuple[Elsewhere, PythonState | None] | None = None
        self._seeds: tuple[list[int | None], int] | None = None
        self._inspection = inspection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            args, kwargs = self._inputs.again(self._name, args, kwargs)
            seeds = seeds_again(self._seeds)
            with self._again(), self._attributes.as_of(self._before), self._elsewhere_as_before(), seeds:
                result = self._run(*args, **kwargs)
            if self._inspection is not None:
                self._inspection.compare(result)
            return result
        self._before = self._attributes.take()
        self._elsewhere, self._seeds = self._look_elsewhere(), seeds_from_here()
        given_args, given_kwargs = self._inputs.given
        result = self._run(*given_args, **given_kwargs)
        self._attributes.forward_is_over(self._before)
        if self._inspection is not None:
            self._inspection.keep(result)
        return result

    def _look_elsewhere(self) -> tuple[Elsewhere, PythonState | None] | None:
        if self._outside is None:
            return None
        state = PythonState() if self._outside.draws else None
        return self._outside.take(with_attributes=False), state

    @contextlib.contextmanager
    def _elsewhere_as_before(self) -> Iterator[None]:
        """Restore the state outside the layer from before the first forward inside the context, and the present one after it."""
        now = self._look_elsewhere()
        if self._elsewhere is None or now is None:
            yield
            return
        _put_back(*self._elsewhere)
        try:
            yield
        finally:
            _put_back(*now)


def _put_back(elsewhere: Elsewhere, state: PythonState | None) -> None:
    elsewhere.restore()
    if state is not None:
        state.restore()


def _run(original: type[nn.Module], owner: Recompute, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if owner.before is not None:
        owner.before(layer)
    made = type(layer)
    if torch.compiler.is_compiling() or made is original:
        return original.forward(layer, *args, **kwargs)
    # What code sets on `type(self)` belongs to the class of all such layers, whose state a repetition puts back.
    layer.__class__ = original
    try:
        return original.forward(layer, *args, **kwargs)
    finally:
        if type(layer) is original:  # a forward may give it another class
            layer.__class__ = made
