"""Layers that run whole on the ranks that share them: what others see of that."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.apply.tensor.part import Part


class Follows(TorchFunctionMode):
    """Follows what code does with tensors, as a stage of a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_looks_at_hooks_are_no_code_of_the_layer() -> None:
    """A pipeline's stage took them for code between layers that uses the averages which a norm had just written."""
    part, follows = object.__new__(Part), Follows()
    part._hooks = {}
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: gradient)
    with follows:
        part._refuse_lost_hooks({"weight": weight})
    assert not follows.seen
    assert list(part._hooks) == ["weight"]
