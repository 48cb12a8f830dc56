"""Watch over one trial's code: labels that its cross-entropies ignore, class weights, reads by Python, gradients in the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.apply.modules.copies import own_copy
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.weights import IGNORED_LABEL
from meshwright.run.losses.widened import is_low
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_OWN_SLOPES: dict[Any, str] = {
    Tensor.register_hook: "a hook on a tensor (register_hook)",
    torch.autograd.grad: "torch.autograd.grad",
}
_READS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)


class TrialWatch(TorchFunctionMode):
    """Records labels that cross-entropies ignore, class weights, reads of values by Python, and gradients of code's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: list[int] = []
        self.has_class_weights = False
        self.branches = False
        self.is_coarse = False
        """Whether a function has returned numbers with fewer digits than float32's."""
        self.own_slopes = ""
        """What code has done about gradients by itself, for people; "" for nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.branches |= func in _READS
        if func in _OWN_SLOPES and not self.own_slopes:
            self.own_slopes = _OWN_SLOPES[func]
        if func in (F.cross_entropy, F.nll_loss):
            self.ignored.append(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED_LABEL)))
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if weight is not None and kwargs.get("reduction", "mean") == "mean":
                self.has_class_weights |= bool((weight != weight[0]).any())
        found = func(*args, **kwargs)
        if not self.is_coarse:
            parts = found if isinstance(found, (tuple, list)) else (found,)
            self.is_coarse = any(type(part) is Tensor and is_low(part) for part in parts)
        return found


def term_with_slopes(term: Callable[[Any, Any], LossTerm], outputs: Any, batch: Any) -> LossTerm:
    """Return the loss; where it raises without a graph, compute it on outputs that it may take gradients of.

    Args:
        term: (outputs, batch) -> loss.
        outputs: The model's outputs, with or without a graph.
        batch: What the loss reads beside them.
    """
    has_graph = torch.is_grad_enabled()
    kept = batch if has_graph else own_copy(batch)
    try:
        return term(outputs, batch)
    except Exception:
        if has_graph:
            raise
        with torch.enable_grad():
            leaves = map_tensors(outputs, _leaf)
            found = term(leaves, kept)
        if any(leaf.grad is not None for leaf in tensors_in(leaves)):
            raise  # it runs backward itself, which a trial with the model's graph refuses
        return found


def _leaf(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    return held.requires_grad_() if held.is_floating_point() and not held.is_meta else held
