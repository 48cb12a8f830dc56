"""The mode that follows one shard of an accepted cut, call by call, beside the record of the whole run.

It follows the last rank, whose share is the smallest: there every sharded dim differs from the whole's. A rank's code that
differs from another's for any other reason than its share has read a number that is not replicated, which is refused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.apply.tensor.region import Role
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.types import indexing, pointwise
from meshwright.apply.tensor.types.gradients import GradientError, Tape
from meshwright.apply.tensor.types.lattice import (
    NOWHERE,
    PARTIAL,
    REPLICATED,
    VARYING,
    RefusedError,
    Type,
    Typed,
    Where,
    shard,
)
from meshwright.apply.tensor.types.marked import Size
from meshwright.apply.tensor.types.operation import Operation
from meshwright.apply.tensor.types.record import (
    Record,
    find_where,
    flat_tensors,
    is_torchs_own,
    name_of,
)
from meshwright.apply.tensor.types.report import TypeReport
from meshwright.apply.tensor.types.rules import result_types
from meshwright.comm import functional
from meshwright.comm._torch_private import without_function_modes
from meshwright.describe.tree import tensors_in

__all__: list[str] = []

_CLOSED: tuple[Role, ...] = ("attention", "vocabulary", "inner")
"""Roles whose modules run code of ours: what they take and give is known, what is inside is not followed."""

_EXCHANGES: dict[str, tuple[str, str]] = {
    "copy": ("replicated", "replicated"),
    "reduce": ("partial", "replicated"),
    "gather": ("shard", "replicated"),
    "all_gather": ("shard", "replicated"),
    "scatter": ("replicated", "shard"),
    "reduce_scatter": ("partial", "shard"),
}


class Checker(TorchFunctionMode):
    """Follows a run on a shard.

    Args:
        scope: The module before it was cut: what its integers are.
        cutting: The layout, in force on a copy of the module.
        record: What the whole run called.
    """

    def __init__(self, scope: nn.Module, cutting: Cutting, record: Record) -> None:
        super().__init__()
        self.report = TypeReport()
        self._cutting = cutting
        self._module = cutting.module
        self._whole = record.follow()
        self._tape = Tape()
        self._values: dict[int, Typed] = {}
        self._closed: list[str] = []
        self._paths = {id(child): path for path, child in self._module.named_modules()}
        self._partial = {path for region in cutting.layout.regions for path in region.once}
        self._sources()
        for region in cutting.layout.regions:
            for path, key in region.integers:
                self._mark_integer(self._module.get_submodule(path), key, getattr(scope.get_submodule(path), key))

    # -- where types come from ------------------------------------------------------------------------------------

    def _sources(self) -> None:
        cuts = {id(find_tensor(self._module, path)): cut.dim for path, (_, cut) in self._cutting.layout.cuts.items()}
        named = [*self._module.named_parameters(remove_duplicate=False), *self._module.named_buffers()]
        for path, tensor in named:
            if id(tensor) in cuts:
                kind, full = shard(cuts[id(tensor)]), self._cutting.full_shape(path) or tuple(tensor.shape)
            else:
                kind, full = PARTIAL if path in self._partial else REPLICATED, tuple(tensor.shape)
            self._values.setdefault(id(tensor), Typed(tensor, kind, full, path))

    def _mark_integer(self, owner: nn.Module, key: str, full: int) -> None:
        local = getattr(owner, key)
        if local != full:
            setattr(owner, key, Size(local, full, self._compared))

    def run_and_watch(self, inputs: Any) -> Any:
        """Return what the module gives; the report then says what the types are."""
        for tensor in tensors_in(inputs):
            self._values[id(tensor)] = Typed(tensor, REPLICATED, tuple(tensor.shape), "an input")
        given = [self._values[id(tensor)] for tensor in tensors_in(inputs)]
        with self._modules_watched(), self._exchanges_watched(), self:
            outputs = self._module(*inputs[0], **inputs[1])
        if not self.report.refusals:
            self._finish(outputs, given)
        return outputs

    @contextlib.contextmanager
    def _exchanges_watched(self) -> Iterator[None]:
        key = threading.get_ident()
        functional.WATCHERS[key] = self._exchange
        try:
            yield
        finally:
            del functional.WATCHERS[key]

    # -- calls ------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._closed or self.report.refusals:
            return func(*args, **kwargs)
        inputs = [self._typed(tensor) for tensor in flat_tensors((args, kwargs))]
        result = func(*args, **kwargs)
        name = name_of(func)
        outputs = list(flat_tensors(result))
        if not outputs and name != "setitem":
            return self._fact(func, name, args, inputs, result)
        where, is_own = find_where()
        try:
            self._follow(func, Operation(name, args, kwargs, inputs, outputs, None, {}), where, is_own=is_own)
        except RefusedError as error:
            self.report.refuse(name, where, str(error))
        except Exception as error:  # noqa: BLE001 - a rule that meets what it was not written for has not shown anything
            self.report.refuse(name, where, f"has no rule for these arguments ({type(error).__name__}: {error})")
        return result

    def _typed(self, tensor: Tensor) -> Typed:
        found = self._values.get(id(tensor))
        if found is None:
            # Constants that the code holds are the same everywhere; what has a graph was made of something unseen.
            is_known = isinstance(tensor, Slices) or tensor.grad_fn is None
            found = Typed(tensor, REPLICATED if is_known else VARYING, tuple(tensor.shape), "a constant")
            self._values[id(tensor)] = found
        return found

    def _follow(self, func: Callable[..., Any], op: Operation, where: Where, *, is_own: bool) -> None:
        self.report.num_operations += 1
        if is_own:
            op.wholes = None if op.is_replicated else _by_meta(func, op)
        else:
            event = self._whole.call(op.name, where)
            op.wholes, op.integers = event.shapes, event.integers
        self._check_drawing(op)
        if is_written(func):
            self._check_target(op)
        found = result_types(op)
        if is_written(func):
            self._write(op, found[0], where)
            return
        made: list[Typed] = []
        for index, (tensor, kind) in enumerate(zip(op.outputs, found, strict=True)):
            known = self._values.get(id(tensor))
            if known is not None and any(tensor is value.tensor for value in op.inputs):
                continue  # it gave its argument back
            full = op.wholes[index] if op.wholes is not None else tuple(tensor.shape)
            typed = Typed(tensor, kind, full, op.name, where)
            self._values[id(tensor)] = typed
            made.append(typed)
        self._tape.add("operation", op.inputs, made)

    def _check_target(self, op: Operation) -> None:
        target = self._typed(op.args[0])
        other = next((value for value in op.inputs if value.type.kind != "replicated"), None)
        is_new = target.type.is_zero and self._is_made(target)
        if target.type.kind == "replicated" and other is not None and not is_new:
            raise RefusedError(f"writes what comes from {other.type} into what is replicated, in place")

    def _write(self, op: Operation, kind: Type, where: Where) -> None:
        """Take note of a tensor that was written to in place, and of the one that it is a view of."""
        target: Tensor = op.args[0]
        targets = [target] if target._base is None else [target, target._base]
        made: list[Typed] = []
        for tensor in targets:
            old = self._typed(tensor)
            is_new = old.type.is_zero and self._is_made(old)
            if kind.kind != old.type.kind and not is_new:
                raise RefusedError(f"writes what is {kind} into what is {old.type}, in place")
            if kind.dim != old.type.dim and tensor is target and not is_new:
                raise RefusedError(f"writes what is {kind} into what is {old.type}, in place")
            own = kind if tensor is target or is_new else old.type
            typed = Typed(tensor, own, old.full, old.name, where)
            self._values[id(tensor)] = typed
            made.append(typed)
            op.inputs.append(old)
        self._tape.add("operation", op.inputs, made)

    def _is_made(self, value: Typed) -> bool:
        return value.where != NOWHERE

    def _check_drawing(self, op: Operation) -> None:
        """Refuse masks that would differ on copies of a tensor, or be the same on its parts."""
        if op.name not in pointwise.DROPOUTS or not op.inputs:
            return
        p, training = op.argument(1, "p", default=0.5), op.argument(2, "training", "train", default=True)
        if not training or not p:
            return
        kind, is_apart = op.inputs[0].type, self._cutting.draws_apart
        if kind.kind in ("replicated", "partial") and is_apart:
            raise RefusedError(f"draws on a tensor that is {kind} where each rank draws numbers of its own")
        if kind.kind == "shard" and not is_apart:
            raise RefusedError("draws on parts where all ranks draw the same numbers")

    # -- facts ------------------------------------------------------------------------------------------------------

    def _fact(self, func: Any, name: str, args: Sequence[Any], inputs: Sequence[Typed], result: Any) -> Any:
        other = next((value for value in inputs if value.type.kind != "replicated"), None)
        if other is None:
            return result
        where, is_own = find_where()
        if name in indexing.READS and not is_own:
            self.report.refuse(name, where, f"reads a number of a tensor that is {other.type}: each rank reads another")
        elif getattr(func, "__name__", "") == "__set__" and name == "data":
            self.report.refuse(name, where, f"sets the data of a tensor, and takes {other.type}")
        elif name in ("shape", "size", "numel") and other.type.dim is not None and not is_own:
            return self._marked(result, name, args, inputs[0])
        return result

    def _marked(self, result: Any, name: str, args: Sequence[Any], value: Typed) -> Any:
        if isinstance(result, torch.Size):
            sizes = [
                Size(own, full, self._compared) if own != full else own
                for own, full in zip(result, value.full, strict=True)
            ]
            return torch.Size(sizes)
        if name == "numel":
            full = 1
            for size in value.full:
                full *= size
            return Size(result, full, self._compared)
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else None
        if dim is None or value.full[dim] == result:
            return result
        return Size(result, value.full[dim], self._compared)

    def _compared(self, is_same: bool, is_plain: bool) -> None:
        if is_torchs_own(sys._getframe(1)):
            return
        where, is_own = find_where()
        if is_own or self._closed:
            return
        if is_plain:
            self.report.compared_sizes.add((where.file, where.line))
        if not is_same and not self.report.refusals:
            self.report.refuse(
                "a comparison", where, "of the size of a sharded dim comes out otherwise than on one device"
            )

    # -- exchanges and modules of ours ------------------------------------------------------------------------------

    def _exchange(self, name: str, function: Any, tensor: Tensor, group: Any, *rest: Any) -> Tensor:
        if self._closed or self.report.refusals:
            return function.apply(tensor, group, *rest)
        with without_function_modes():
            result: Tensor = function.apply(tensor, group, *rest)
            given = self._typed(tensor)
            taken, gives = _EXCHANGES[name]
            is_right = given.type.kind == taken or (taken == "partial" and given.type.is_zero)
            if not is_right or (taken == "shard" and given.type.dim != rest[0]):
                where, _ = find_where()
                self.report.refuse(
                    f"the exchange ({name})",
                    where,
                    f"takes a tensor that is {given.type}, not {taken}, of {_told(given)}",
                )
                return result
            kind = shard(rest[0]) if gives == "shard" else REPLICATED
            full = given.full if gives == "shard" or name in ("copy", "reduce") else tuple(result.shape)
            typed = Typed(result, kind, full, name, given.where)
            self._values[id(result)] = typed
            self._tape.add(name, [given], [typed])
            return result

    @contextlib.contextmanager
    def _modules_watched(self) -> Iterator[None]:
        handles: list[Any] = []
        for region in self._cutting.layout.regions:
            closed = {path: role for path, role in region.roles.items() if role in _CLOSED}
            closed |= dict.fromkeys(region.shared, "column")
            modules = {id(child := self._module.get_submodule(path)): (child, role) for path, role in closed.items()}
            for child, role in modules.values():
                handles += self._close(child, self._paths[id(child)], role)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _close(self, child: nn.Module, path: str, role: str) -> list[Any]:
        taken: list[Typed] = []

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            if not self._closed and not self.report.refusals:
                with without_function_modes():
                    taken[:] = [self._typed(tensor) for tensor in tensors_in((args, kwargs))]
                    self._check_taken(path, role, taken)
            self._closed.append(path)

        def leave(_: Any, __: Any, outputs: Any) -> None:
            self._closed.pop()
            if self._closed or self.report.refusals:
                return
            with without_function_modes():
                try:
                    self._give(child, path, role, taken, list(tensors_in(outputs)))
                except RefusedError as error:
                    self.report.refuse(f"'{path}'", NOWHERE, str(error))

        return [child.register_forward_pre_hook(enter, with_kwargs=True), child.register_forward_hook(leave)]

    def _check_taken(self, path: str, role: str, taken: Sequence[Typed]) -> None:
        for index, value in enumerate(taken):
            last = value.tensor.dim() - 1
            is_right = value.type == shard(last) if role == "inner" and index == 0 else value.type.kind == "replicated"
            if self._cutting.layout.chains and value.type.dim is not None:
                is_right = True  # a layer's slices, which the module takes in by itself
            if not is_right:
                self.report.refuse(f"'{path}'", value.where, f"takes a tensor that is {value.type}")

    def _give(self, child: nn.Module, path: str, role: str, taken: list[Typed], outputs: list[Tensor]) -> None:
        wholes = self._whole.pass_module(path)
        op = Operation(path, (), {}, taken, outputs, wholes, {})
        found = op.by_shapes() if role in ("inner", "column") else _parts(op)
        made = [Typed(tensor, kind, whole, path) for tensor, kind, whole in zip(outputs, found, wholes, strict=True)]
        self._values.update((id(value.tensor), value) for value in made)
        own = [self._typed(parameter) for parameter in child.parameters()]
        # What is whole and serves a part has a term of the gradient, on slices of a layer's stream, too.
        is_whole = all(kind.kind == "replicated" for kind in found)
        self._tape.add("module" if is_whole else "operation", own, made)
        if role == "inner":
            self._tape.add("operation", taken, made)
        else:  # it takes its tensors in by itself
            self._tape.add("copy" if role == "column" else "module", taken, made)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, outputs: Any, given: Sequence[Typed]) -> None:
        try:
            self._whole.finish()
        except RefusedError as error:
            self.report.refuse("the forward", NOWHERE, str(error))
            return
        leaving: list[Typed] = []
        for index, tensor in enumerate(tensors_in(outputs)):
            value = self._typed(tensor.local if isinstance(tensor, Slices) else tensor)
            leaving.append(value)
            wanted = shard(tensor.cut_dim) if isinstance(tensor, Slices) else REPLICATED
            if value.type.kind != wanted.kind or value.type.dim != wanted.dim:
                self.report.refuse(
                    value.name, value.where, f"gives result {index}, which leaves as {value.type}, not {wanted}"
                )
        self._check_kept()
        if not self.report.refusals:
            self._check_gradients(leaving, given)

    def _check_kept(self) -> None:
        """Refuse what is kept in a buffer or an attribute and is not replicated."""
        cut = {id(find_tensor(self._module, path)) for path in self._cutting.layout.cuts}
        for path, child in self._module.named_modules():
            kept = {
                **child._buffers,
                **{key: value for key, value in vars(child).items() if not key.startswith("_forward")},
            }
            for key, tensor in ((key, tensor) for key, tree in kept.items() for tensor in _kept_tensors(key, tree)):
                value = self._values.get(id(tensor))
                if value is not None and value.type.kind != "replicated" and id(tensor) not in cut:
                    name = ".".join(part for part in (path, key) if part)
                    self.report.refuse(value.name, value.where, f"gives what is kept as '{name}' and is {value.type}")

    def _check_gradients(self, leaving: Sequence[Typed], given: Sequence[Typed]) -> None:
        try:
            self._tape.go_back([value for value in leaving if value.tensor.requires_grad])
            for value in given:
                if "term" in value.gradients:
                    raise GradientError(value, "is a term of a sum on each rank, which nothing adds up")
        except GradientError as error:
            self.report.refuse(error.value.name, error.value.where, str(error))
            return
        for path, parameter in self._module.named_parameters(remove_duplicate=False):
            value = self._values[id(parameter)]
            if "term" in value.gradients or (value.type.kind == "partial" and value.gradients):
                self.report.partial.add(path)


def is_written(func: Callable[..., Any]) -> bool:
    """Tell whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _parts(op: Operation) -> list[Type]:
    """Return replicated for what has the whole's shape, and the part that it is for a slice of a layer's stream."""
    found: list[Type] = []
    for index in range(len(op.outputs)):
        dims = op.differing(index)
        found.append(shard(dims[0]) if len(dims) == 1 else REPLICATED)
    return found


def _by_meta(func: Callable[..., Any], op: Operation) -> list[tuple[int, ...]] | None:
    """Return the shapes that a call of our own code would give on whole tensors; None where it cannot be told."""
    fulls = {id(value.tensor): torch.empty(value.full, dtype=value.tensor.dtype, device="meta") for value in op.inputs}

    def full(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return fulls[id(tree)]
        return type(tree)(full(item) for item in tree) if type(tree) in (list, tuple) else tree

    try:
        with torch.no_grad():
            return [
                tuple(t.shape) for t in flat_tensors(func(*full(op.args), **{k: full(v) for k, v in op.kwargs.items()}))
            ]
    except Exception:  # noqa: BLE001 - whatever a function raises on tensors without values
        return None


def _kept_tensors(key: str, tree: Any) -> Iterator[Tensor]:
    if key in ("_parameters", "_buffers", "_modules"):
        return
    yield from flat_tensors(tree)


def _told(value: Typed) -> str:
    return f"{value.name} at {value.where}" if value.where != NOWHERE else value.name
