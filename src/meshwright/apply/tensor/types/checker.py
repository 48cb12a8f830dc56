"""Checker: a mode that follows one shard of an accepted cut, call by call, beside the record of the whole run.

It follows the last rank, whose share is the smallest, so that every sharded dim differs from the whole's. If a rank's code
differs from another's for any other reason than its share, it has read a value that is not replicated, which is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.cutting import Cutting
from meshwright.apply.tensor.types import pointwise
from meshwright.apply.tensor.types.edges import watched
from meshwright.apply.tensor.types.ending import finish
from meshwright.apply.tensor.types.lattice import (
    NOWHERE,
    REPLICATED,
    RefusedError,
    Type,
    Typed,
    Where,
)
from meshwright.apply.tensor.types.marked import Size
from meshwright.apply.tensor.types.operation import Operation
from meshwright.apply.tensor.types.report import TypeReport
from meshwright.apply.tensor.types.rules import DRAWS, result_types
from meshwright.apply.tensor.types.state import UNKNOWN, TypingState
from meshwright.apply.tensor.types.typed_run import READS, Record, find_where, is_torchs_own, name_of
from meshwright.trees import arguments_in, tensors_in

__all__: list[str] = []


_HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook"])


class Checker(TorchFunctionMode):
    """Follows a run on a shard.

    Args:
        scope: The module before it was cut, with its own integers.
        cutting: The layout, applied to a copy of the module.
        record: Calls of the whole run.
    """

    def __init__(self, scope: nn.Module, cutting: Cutting, record: Record) -> None:
        super().__init__()
        self._state = state = TypingState(cutting, record)
        for region in cutting.layout.regions:
            for path, key in region.integers:
                self._mark_integer(state.module.get_submodule(path), key, getattr(scope.get_submodule(path), key))

    @property
    def report(self) -> TypeReport:
        """The report."""
        return self._state.report

    def _mark_integer(self, owner: nn.Module, key: str, full: int) -> None:
        local = getattr(owner, key)
        if local != full:
            setattr(owner, key, Size(local, full, self._comes_out_otherwise))

    def run_and_watch(self, inputs: Any) -> Any:
        """Run the module and return its results; the report then has the types."""
        state = self._state
        given = [Typed(tensor, REPLICATED, tuple(tensor.shape), "an input") for tensor in tensors_in(inputs)]
        for value in given:
            state.put(value)
        with watched(state), self:
            outputs = state.module(*inputs[0], **inputs[1])
        if not state.is_over:
            finish(state, outputs, given)
        return outputs

    # -- calls ------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._state.closed or self._state.is_over:
            return func(*args, **kwargs)
        inputs = [self._state.typed(tensor) for tensor in arguments_in((args, kwargs))]
        result = func(*args, **kwargs)
        name = name_of(func)
        outputs = list(arguments_in(result))
        if not outputs and name != "setitem":
            return self._fact(func, name, args, inputs, result)
        where, is_own = find_where()
        try:
            self._follow(func, Operation(name, args, kwargs, inputs=inputs, outputs=outputs), where, is_own=is_own)
        except RefusedError as error:
            self.report.refuse(name, where, str(error))
        except Exception as error:  # noqa: BLE001 - a rule that meets what it was not written for has not shown anything
            self.report.refuse(name, where, f"has no rule for these arguments ({type(error).__name__}: {error})")
        return result

    def _follow(self, func: Callable[..., Any], op: Operation, where: Where, *, is_own: bool) -> None:
        self.report.num_operations += 1
        if is_own:
            op.wholes = None if op.is_replicated else _by_meta(func, op)
        else:
            event = self._state.whole.call(op.name, where)
            op.wholes, op.integers = event.shapes, event.integers
        if any(value.name == UNKNOWN for value in op.inputs):
            raise RefusedError(f"takes {UNKNOWN}, so that its type is not known")
        self._check_drawing(op)
        if is_written(func):
            self._check_target(op)
        found = result_types(op)
        if is_written(func):
            self._write(op, found[0], where)
            return
        made: list[Typed] = []
        for index, (tensor, kind) in enumerate(zip(op.outputs, found, strict=True)):
            known = self._state.known(tensor)
            if known is not None and any(tensor is value.tensor for value in op.inputs):
                continue  # it gave its argument back
            full = op.wholes[index] if op.wholes is not None else tuple(tensor.shape)
            typed = Typed(tensor, kind, full, op.name, where)
            self._state.put(typed)
            made.append(typed)
        self._state.tape.add("operation", op.inputs, made)

    def _check_target(self, op: Operation) -> None:
        target = self._state.typed(op.args[0])
        other = next((value for value in op.inputs if value.type.kind != "replicated"), None)
        is_new = target.type.is_zero and target.where != NOWHERE
        if target.type.kind == "replicated" and other is not None and not is_new:
            raise RefusedError(f"writes what comes from {other.type} into what is replicated, in place")

    def _write(self, op: Operation, kind: Type, where: Where) -> None:
        """Record a write in place to a tensor, and to its base."""
        target: Tensor = op.args[0]
        targets = [target] if target._base is None else [target, target._base]
        made: list[Typed] = []
        for tensor in targets:
            old = self._state.typed(tensor)
            is_new = old.type.is_zero and old.where != NOWHERE
            is_other = kind.kind != old.type.kind or (kind.dim != old.type.dim and tensor is target)
            if is_other and not is_new:
                raise RefusedError(f"writes what is {kind} into what is {old.type}, in place")
            own = kind if tensor is target or is_new else old.type
            typed = Typed(tensor, own, old.full, old.name, where)
            self._state.put(typed)
            made.append(typed)
            op.inputs.append(old)
        self._state.tape.add("operation", op.inputs, made)

    def _check_drawing(self, op: Operation) -> None:
        """Refuse masks that would differ on copies of a tensor, or be the same on its shards."""
        is_apart = self._state.cutting.draws_apart
        if op.name in DRAWS and is_apart:
            raise RefusedError("draws random numbers for all ranks where each rank draws numbers of its own")
        if not op.inputs or not pointwise.drops(op.name, op.args, op.kwargs):
            return
        if op.inputs[0].type.kind != "shard" and is_apart:
            kind = op.inputs[0].type
            raise RefusedError(f"draws on a tensor that is {kind} where each rank draws numbers of its own")
        if op.inputs[0].type.kind == "shard" and not is_apart:
            raise RefusedError("draws on parts where all ranks draw the same numbers")

    # -- facts ------------------------------------------------------------------------------------------------------

    def _fact(self, func: Any, name: str, args: Sequence[Any], inputs: Sequence[Typed], result: Any) -> Any:
        if name in _HOOKS:
            self._state.hooked += [(value, find_where()[0]) for value in inputs[:1]]
        other = next((value for value in inputs if value.type.kind != "replicated"), None)
        if other is None:
            return result
        where, is_own = find_where()
        if name in READS and not is_own:
            self.report.refuse(name, where, f"reads a number of a tensor that is {other.type}: each rank reads another")
        elif getattr(func, "__name__", "") == "__set__" and name == "data":
            self.report.refuse(name, where, f"sets the data of a tensor, and takes {other.type}")
        elif name in _HOOKS:
            self.report.refuse(name, where, f"lets code see the gradient of a tensor that is {other.type}")
        elif name in ("shape", "size", "numel") and other.type.dim is not None and not is_own:
            return self._marked(result, name, args, inputs[0])
        return result

    def _marked(self, result: Any, name: str, args: Sequence[Any], value: Typed) -> Any:
        if isinstance(result, torch.Size):
            sizes = [
                Size(own, full, self._comes_out_otherwise) if own != full else own
                for own, full in zip(result, value.full, strict=True)
            ]
            return torch.Size(sizes)
        if name == "numel":
            return Size(result, math.prod(value.full), self._comes_out_otherwise)
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else None
        if dim is None or value.full[dim] == result:
            return result
        return Size(result, value.full[dim], self._comes_out_otherwise)

    def _comes_out_otherwise(self) -> None:
        where, is_own = find_where()
        if not (is_torchs_own(sys._getframe(1)) or is_own or self._state.closed or self._state.is_over):
            self.report.refuse(
                "a comparison", where, "of the size of a sharded dim comes out otherwise than on one device"
            )


def is_written(func: Callable[..., Any]) -> bool:
    """Tell whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _by_meta(func: Callable[..., Any], op: Operation) -> list[tuple[int, ...]] | None:
    """Return the shapes that a call of our own code would have on whole tensors; None where that is not known."""
    fulls = {id(value.tensor): torch.empty(value.full, dtype=value.tensor.dtype, device="meta") for value in op.inputs}

    def full(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return fulls[id(tree)]
        return type(tree)(full(item) for item in tree) if type(tree) in (list, tuple) else tree

    try:
        with torch.no_grad():
            return [
                tuple(t.shape) for t in arguments_in(func(*full(op.args), **{k: full(v) for k, v in op.kwargs.items()}))
            ]
    except Exception:  # noqa: BLE001 - whatever a function raises on tensors without values
        return None
