"""Hooks that a trial registers are gone with the flag that says that they are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.state.hook_tables import hooks_put_back
from meshwright.apply.tensor.inspection import compare_runs


class Captures(nn.Module):
    """Registers a hook in its first forward, and returns what the hook has collected."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.has_hooks = False
        self.found: list[Tensor] = []

    def _keep(self, _module: nn.Module, _given: Any, out: Tensor) -> None:
        self.found.append(out)

    def forward(self, x: Tensor) -> list[Tensor]:
        if not self.has_hooks:
            self.layer.register_forward_hook(self._keep)
            self.has_hooks = True
        self.found = []
        return [self.layer(x), *self.found]


def test_hooks_come_back_in_their_order() -> None:
    layer = nn.Linear(2, 2)
    first = layer.register_forward_hook(lambda *_: None)
    last = layer.register_forward_hook(lambda *_: None)
    before = list(layer._forward_hooks.items())
    with hooks_put_back(layer.modules()):
        first.remove()
        layer.register_forward_hook(lambda *_: None, prepend=True)
        layer.register_forward_pre_hook(lambda *_: None)
    assert list(layer._forward_hooks.items()) == before
    assert not layer._forward_pre_hooks
    last.remove()
    assert len(layer._forward_hooks) == 1


def test_an_inspection_leaves_no_hook_and_sees_none_twice() -> None:
    module, given = Captures(), ((torch.ones(1, 3),), {})
    findings, _ = compare_runs(
        module, "it", given, cut=lambda given: module(*given[0]), whole=lambda given: module(*given[0])
    )
    assert not findings
    assert not module.has_hooks
    assert not module.layer._forward_hooks
    assert len(module(torch.ones(1, 3))) == 2
