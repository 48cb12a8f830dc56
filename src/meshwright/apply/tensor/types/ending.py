"""Checks at the end of a forward: the types of results, of kept tensors and of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.apply.tensor.cutting import find_tensor
from meshwright.apply.tensor.slices import Slices
from meshwright.apply.tensor.types.gradients import GradientError
from meshwright.apply.tensor.types.lattice import NOWHERE, REPLICATED, RefusedError, Typed, shard
from meshwright.apply.tensor.types.state import TypingState
from meshwright.trees import arguments_in, tensors_in

__all__: list[str] = []


def finish(state: TypingState, outputs: Any, given: Sequence[Typed]) -> None:
    """Check the results and side effects of a run, and complete the report; `given` are its arguments."""
    try:
        state.whole.finish()
    except RefusedError as error:
        state.report.refuse("the forward", NOWHERE, str(error))
        return
    leaving: list[Typed] = []
    for index, tensor in enumerate(tensors_in(outputs)):
        value = state.typed(tensor.local if isinstance(tensor, Slices) else tensor)
        leaving.append(value)
        wanted = shard(tensor.cut_dim) if isinstance(tensor, Slices) else REPLICATED
        if value.type.kind != wanted.kind or value.type.dim != wanted.dim:
            text = f"gives result {index}, which leaves as {value.type}, not {wanted}"
            state.report.refuse(value.name, value.where, text)
    _check_kept(state)
    if not state.is_over:
        _check_gradients(state, leaving, given)


def _check_kept(state: TypingState) -> None:
    """Refuse tensors kept in a buffer or an attribute that are not replicated."""
    cut = {id(find_tensor(state.module, path)) for path in state.cutting.layout.cuts}
    for path, child in state.module.named_modules():
        for key, tensor in _kept(vars(child)):
            value = state.known(tensor)
            if value is not None and value.type.kind != "replicated" and id(tensor) not in cut:
                name = ".".join(part for part in (path, key) if part)
                text = f"gives what is kept as '{name}' and is {value.type}"
                state.report.refuse(value.name, value.where, text)


def _kept(attributes: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, tree in (*attributes.items(), *attributes["_buffers"].items()):
        if key not in ("_parameters", "_buffers", "_modules"):
            # A plain object of the user's may hold some, too.
            inner = vars(tree) if hasattr(tree, "__dict__") and not isinstance(tree, (Tensor, nn.Module, type)) else {}
            for tensor in arguments_in((tree, *inner.values())):
                yield key, tensor


def _check_gradients(state: TypingState, leaving: Sequence[Typed], given: Sequence[Typed]) -> None:
    try:
        state.tape.go_back([value for value in leaving if value.tensor.requires_grad])
        for value in given:
            if "term" in value.gradients:
                raise GradientError(value, "is a term of a sum on each rank, which nothing adds up")
        for value, where in state.hooked:
            if "term" in value.gradients:
                state.report.refuse(
                    "register_hook", where, "lets code see a gradient that is a term of a sum on each rank"
                )
    except GradientError as error:
        state.report.refuse(error.value.name, error.value.where, str(error))
        return
    for path, parameter in state.module.named_parameters(remove_duplicate=False):
        value = state.typed(parameter)
        if "term" in value.gradients or (value.type.kind == "partial" and value.gradients):
            state.report.partial.add(path)
