"""The graph behind a loss: which forwards of models under plans it comes from, and which parameters it would train."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright._torch_private import recorded_shape
from meshwright.errors import ApplyError
from meshwright.trees import tensors_in

__all__: list[str] = []

_KEY = "meshwright"
_HIDES = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint, which makes its graph in backward."""


@dataclasses.dataclass(eq=False, slots=True)
class ForwardMark:
    """One call of a model under a plan, on the graph nodes of its outputs."""

    loop: weakref.ref[Any]
    """The own loop over the model."""
    version: int
    """Updates of the model's parameters before the call [count]."""
    streams: Any
    """What the strategy needs to know again of this call in backward."""
    before: LossGraph
    """What the call's inputs come from."""
    draws: Any = None
    """The call's random numbers, by which what backward repeats of it is recognised; held as long as the graph."""


@dataclasses.dataclass(slots=True)
class LossGraph:
    """What a loss comes from, up to the calls of models under plans."""

    marks: list[ForwardMark] = dataclasses.field(default_factory=list)
    """The calls, those that only lead to others too."""
    leaves: list[Tensor] = dataclasses.field(default_factory=list)
    """Leaves that get a gradient without such a call: parameters that a loss reads, inputs that require one."""
    recut: Tensor | None = None
    """A leaf that was read when it had another shape, before its layer was cut."""


def mark_outputs(outputs: Any, mark: ForwardMark) -> None:
    """Mark the graph nodes of a call's outputs."""
    for tensor in tensors_in(outputs):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_KEY] = mark


def graph_of(tensors: Iterable[Tensor]) -> LossGraph:
    """Return what these tensors come from; the inside of marked calls is not walked through."""
    found = LossGraph()
    marks: dict[int, ForwardMark] = {}
    leaves: dict[int, Tensor] = {}
    for node in _walk(tensors, marks):
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
            if recorded_shape(node) not in (None, tuple(variable.shape)):
                found.recut = variable
    waiting = list(marks.values())
    while waiting:
        mark = waiting.pop()
        leaves |= {id(leaf): leaf for leaf in mark.before.leaves}
        for other in mark.before.marks:
            if id(other) not in marks:
                marks[id(other)] = other
                waiting.append(other)
    found.marks, found.leaves = list(marks.values()), list(leaves.values())
    return found


def foreign_parameters(root: Tensor, own: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that backward from this tensor trains beside `own`; the whole graph is walked through."""
    known = {id(parameter) for parameter in own}
    variables = [getattr(node, "variable", None) for node in _walk([root], None)]
    return [v for v in variables if isinstance(v, nn.Parameter) and id(v) not in known]


def trains_parameters(roots: Iterable[Tensor]) -> bool:
    """Tell whether backward from these tensors adds to a parameter's gradient, or may: a checkpoint's graph is not there yet."""
    return any(
        isinstance(getattr(node, "variable", None), nn.Parameter) or type(node).__name__ == _HIDES
        for node in _walk(roots, None)
    )


def foreign_error(parameter: nn.Parameter, plan: str) -> ApplyError:
    """Return the error for a loss that trains a parameter of no model under a plan."""
    return ApplyError(
        f"the loss trains a parameter of shape {tuple(parameter.shape)} that is in no model under a plan; the plan '{plan}' does "
        "not exchange its gradient, so ranks would train different ones",
        fix="make it a parameter of the module that apply_plan gets, or apply a plan to its module too",
    )


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield all nodes of the graph that tensors come from."""
    return _walk(tensors, None)


def _walk(tensors: Iterable[Tensor], marks: dict[int, ForwardMark] | None) -> Iterator[Any]:
    """Yield graph nodes; where `marks` is given, marked ones are put into it and not walked beyond."""
    seen: set[Any] = set()
    waiting: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            yield _Leaf(tensor)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        mark = None if marks is None else node.metadata.get(_KEY)
        if mark is not None and marks is not None:
            marks[id(mark)] = mark
            continue
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]


@dataclasses.dataclass(slots=True)
class _Leaf:
    """A tensor without a node, in the place of one."""

    variable: Tensor
