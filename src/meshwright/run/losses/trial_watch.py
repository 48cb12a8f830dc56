"""Watch over one trial's code: labels that its cross-entropies ignore, class weights, and reads of values by Python."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.run.losses.weights import IGNORED_LABEL

__all__: list[str] = []

_READS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)


class TrialWatch(TorchFunctionMode):
    """Records labels that cross-entropies ignore, class weights, and reads of values by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: list[int] = []
        self.has_class_weights = False
        self.branches = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.branches |= func in _READS
        if func in (F.cross_entropy, F.nll_loss):
            self.ignored.append(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED_LABEL)))
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if weight is not None and kwargs.get("reduction", "mean") == "mean":
                self.has_class_weights |= bool((weight != weight[0]).any())
        return func(*args, **kwargs)
