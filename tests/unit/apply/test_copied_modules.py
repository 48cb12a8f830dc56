"""Copies of modules: what `copy.deepcopy` gives, whatever rules a class has of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meshwright.apply.modules.copies import copy_module


class OwnCopy(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        made: Any = OwnCopy(self.in_features, self.out_features)
        made.was_copied = True
        memo[id(self)] = made
        return made


class OwnState(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "left_out": None}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        norm = nn.BatchNorm1d(2)
        norm.weight = self.first.bias
        self.second = nn.Sequential(norm, nn.LSTM(2, 2), OwnCopy(2, 2))
        self.aside = [self.first, {"first": self.first, "numbers": [1, 2]}]
        self.state = OwnState(2, 2)
        vars(self.state)["left_out"] = object()
        self.myself = [self]
        self.name, self.table, self.hooked = "holder", {1: "one"}, torch.zeros(2)


def test_a_copy_is_what_deepcopy_gives() -> None:
    module: Any = Holder()
    module._compiled_call_impl = object()  # torch leaves it out of copies
    made: Any = copy_module(module, torch.clone)
    expected = copy.deepcopy(module)
    assert [(name, type(child)) for name, child in made.named_modules()] == [
        (name, type(child)) for name, child in expected.named_modules()
    ]
    for name, child in made.named_modules():
        assert vars(child).keys() == vars(expected.get_submodule(name)).keys(), name
        assert child is not module.get_submodule(name)
    assert made.second[0].weight is made.first.bias
    assert made.first.bias is not module.first.bias
    assert made.aside[0] is made.aside[1]["first"] is made.first
    assert made.aside[1]["numbers"] == [1, 2]
    assert made.aside[1]["numbers"] is not module.aside[1]["numbers"]
    assert made.second[2].was_copied
    assert made.state.left_out is None
    assert made.myself[0] is made
    assert made.table == {1: "one"}
    assert made.table is not module.table
    assert torch.equal(made.second[1].weight_hh_l0, module.second[1].weight_hh_l0)
    assert made.second[1]._flat_weights[0] is made.second[1].weight_ih_l0


def test_hooks_of_a_copy_are_its_own() -> None:
    module = nn.Linear(2, 2)
    copy_module(module, torch.clone).register_forward_hook(lambda *_: None)
    assert not module._forward_hooks
