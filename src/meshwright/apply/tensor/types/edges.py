"""Edges of regions and chains in the type check: exchanges, and modules that run our code."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.tensor.tensor_layout import Role
from meshwright.apply.tensor.types.lattice import NOWHERE, REPLICATED, RefusedError, Type, Typed, shard
from meshwright.apply.tensor.types.operation import Operation
from meshwright.apply.tensor.types.state import TypingState
from meshwright.apply.tensor.types.typed_run import find_where
from meshwright.comm import functional
from meshwright.trees import tensors_in

__all__: list[str] = []

_INNER: dict[Role, int] = {"inner": -1, "channels": 1}
"""Roles whose modules take and give slices -> the dim in which they lie."""

_CLOSED: tuple[Role, ...] = ("attention", "vocabulary", "stored", *_INNER)
"""Roles whose modules run code of ours: what they take and give is known, what is inside is not followed."""

_EXCHANGES: dict[str, tuple[str, str]] = {
    "copy": ("replicated", "replicated"),
    "reduce": ("partial", "replicated"),
    "gather": ("shard", "replicated"),
    "all_gather": ("shard", "replicated"),
    "scatter": ("replicated", "shard"),
    "reduce_scatter": ("partial", "shard"),
}
"""Exchange -> (type that it takes, type that it gives)."""


@contextlib.contextmanager
def watched(state: TypingState) -> Iterator[None]:
    """Follow this thread's exchanges and the modules whose code is ours."""
    layout, module = state.cutting.layout, state.module
    paths = {id(child): path for path, child in module.named_modules()}
    handles: list[Any] = []
    for region in layout.regions:
        closed: dict[str, Role] = {path: role for path, role in region.roles.items() if role in _CLOSED}
        closed.update(dict.fromkeys(region.shared, "column"))
        children: dict[int, tuple[nn.Module, Role]] = {
            id(child := module.get_submodule(path)): (child, role) for path, role in closed.items()
        }
        for child, role in children.values():
            handles += _Closed(state, child, paths[id(child)], role).handles
    thread = threading.get_ident()
    functional.WATCHERS[thread] = functools.partial(_exchange, state)
    try:
        yield
    finally:
        del functional.WATCHERS[thread]
        for handle in handles:
            handle.remove()


def _exchange(state: TypingState, function: Any, tensor: Tensor, how: functional.How) -> Tensor:
    """Run an exchange, and record its types."""
    if state.closed or state.is_over:
        return function.apply(tensor, how)
    _, dim, _, name = how
    with without_function_modes():
        result: Tensor = function.apply(tensor, how)
        given = state.typed(tensor)
        taken, gives = _EXCHANGES[name]
        is_right = given.type.kind == taken or (taken == "partial" and given.type.is_zero)
        if not is_right or (taken == "shard" and given.type.dim != dim):
            where = given.where if given.where != NOWHERE else find_where()[0]
            text = f"gives a tensor that is {given.type}, and the exchange ({name}) takes what is {taken}"
            state.report.refuse(given.name, where, text)
            return result
        kind = shard(dim) if gives == "shard" else REPLICATED
        full = tuple(result.shape) if gives == "replicated" else given.full
        made = Typed(result, kind, full, name, given.where)
        state.put(made)
        state.tape.add(name, [given], [made])
        return result


class _Closed:
    """A module that is not followed inside."""

    def __init__(self, state: TypingState, module: nn.Module, path: str, role: Role) -> None:
        self._state = state
        self._module = module
        self._path = path
        self._role = role
        self._taken: list[Typed] = []
        self.handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        state = self._state
        if not state.closed and not state.is_over:
            with without_function_modes():
                self._taken = [state.typed(tensor) for tensor in tensors_in((args, kwargs))]
                self._check_taken()
        state.closed.append(self._path)

    def _leave(self, _: nn.Module, __: Any, outputs: Any) -> None:
        state = self._state
        state.closed.pop()
        if state.closed or state.is_over:
            return
        with without_function_modes():
            try:
                self._give(list(tensors_in(outputs)))
            except RefusedError as error:
                state.report.refuse(f"'{self._path}'", NOWHERE, str(error))

    def _check_taken(self) -> None:
        for index, value in enumerate(self._taken):
            if self._role in _INNER and index == 0:
                is_right = value.type == shard(_INNER[self._role] % max(1, value.tensor.dim()))
            else:  # it gathers slices of a layer's stream itself
                is_part = value.type.dim is not None and bool(self._state.cutting.layout.chains)
                is_right = value.type.kind == "replicated" or is_part
            if not is_right:
                self._state.report.refuse(f"'{self._path}'", value.where, f"takes a tensor that is {value.type}")

    def _give(self, outputs: list[Tensor]) -> None:
        state, taken = self._state, self._taken
        wholes = state.whole.pass_module(self._path)
        op = Operation(self._path, (), {}, inputs=taken, outputs=outputs, wholes=wholes)
        made = [
            Typed(tensor, kind, whole, self._path)
            for tensor, kind, whole in zip(outputs, self._types(op), wholes, strict=True)
        ]
        for value in made:
            state.put(value)
        own = [state.typed(parameter) for parameter in self._module.parameters()]
        # A whole tensor used by a shard gets a term of its gradient, on slices of a layer's stream too.
        is_whole = all(value.type.kind == "replicated" for value in made)
        state.tape.add("module" if is_whole else "operation", own, made)
        takes_in = "copy" if self._role == "column" else "module"
        state.tape.add("operation" if self._role in _INNER else takes_in, taken, made)

    def _types(self, op: Operation) -> Sequence[Type]:
        differing = [op.differing(index) for index in range(len(op.outputs))]
        is_part = self._role in (*_INNER, "column")
        if any(len(dims) > 1 or (is_part and not dims) for dims in differing):
            raise RefusedError("gives tensors of other shapes than the whole")
        return [shard(dims[0]) if dims else REPLICATED for dims in differing]
