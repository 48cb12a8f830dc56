"""What stages compare of a layer's attributes after its calls, where layers are cut."""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch import nn

from meshwright.apply.pipeline.walking.later_writes import LaterWrites


def test_a_cut_layer_that_runs_whole_has_changed_nothing() -> None:
    """SEW's last projection has its whole size while it runs whole, which was taken for a number that its code had written."""
    module = nn.Sequential(nn.Linear(4, 8))
    flow = types.SimpleNamespace(watched={"0": (("0", "out_features"),)}, named=(), units=("0",), lent={})
    writes = LaterWrites(module, cast("Any", types.SimpleNamespace(flow=flow, calls={})), in_parts=True)
    for size, has_changed in ((4, False), (8, False), (6, True)):
        module[0].out_features = size
        if size == 4:
            writes.begin()
        assert bool(writes.facts("0")) is has_changed


def test_the_whole_ones_averages_are_no_change_of_their_sizes() -> None:
    """MobileNetV2's last norm has its whole averages while it runs whole."""
    module = nn.Sequential(nn.BatchNorm1d(8))
    flow = types.SimpleNamespace(watched={"0": (("0", "running_mean"),)}, named=(), units=("0",), lent={})
    writes = LaterWrites(module, cast("Any", types.SimpleNamespace(flow=flow, calls={})), in_parts=True)
    for size, has_changed in ((4, False), (8, False), (6, True)):
        module[0].running_mean = torch.zeros(size)
        if size == 4:
            writes.begin()
        assert bool(writes.facts("0")) is has_changed
