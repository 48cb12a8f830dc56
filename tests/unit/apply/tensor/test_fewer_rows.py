"""Regions of calls with many rows, tried on a part of the rows first: what is wrong there costs no run on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.tensor.proof.proof import Experiment
from meshwright.apply.tensor.proof.scope_values import LastDrawn, ScopeValues
from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError
from meshwright.apply.tensor.search.fewer_rows import experiment_with_fewer_rows, with_fewer_rows
from meshwright.apply.tensor.search.regions import _ScopeTrial
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import Cut, Region

WIDTH = 8


class Windows(nn.Module):
    """A block over many windows, with a mask for each of a sample's."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, windows: Tensor, mask: Tensor) -> Tensor:
        samples = windows.view(-1, len(mask), *windows.shape[1:]) + mask
        return self.narrow(self.wide(samples).relu()).view(windows.shape)


def call_of(rows: int = 3072, masks: int = 1024) -> Call:
    return Call(args=(torch.randn(rows, 4, WIDTH, requires_grad=True), torch.zeros(masks, 4, 1)), kwargs={})


def region_of(groups: tuple[int, ...]) -> Region:
    row = {"narrow.weight": Cut(dim=1, groups=(4 * WIDTH,), kind="row")}
    columns = dict.fromkeys(("wide.weight", "wide.bias"), Cut(dim=0, groups=groups))
    return Region(scope="", num_units=WIDTH, cuts={**columns, **row}, roles={"wide": "column", "narrow": "row"})


def test_rows_keep_their_ratio() -> None:
    few = with_fewer_rows(call_of())
    assert few is not None
    windows, mask = few.args
    assert len(windows) == 3 * len(mask) < 64
    assert windows.requires_grad
    assert not {len(windows), len(mask)} & {4, WIDTH}


@pytest.mark.parametrize(("rows", "masks"), [(48, 16), (3072, 1000), (67 * 61, 67 * 61)])
def test_few_rows_and_those_of_no_common_factor_stay(rows: int, masks: int) -> None:
    few = with_fewer_rows(call_of(rows, masks))
    assert few is None or len(few.args[1]) == masks


def test_wrong_regions_are_told_without_a_run_on_all_rows() -> None:
    trial = _ScopeTrial("", Windows(), [call_of()], 2, LastDrawn())
    right = region_of((4 * WIDTH,))
    trial.try_quickly(right)
    row = Cut(dim=1, groups=(2 * WIDTH, 2 * WIDTH), kind="row")
    with pytest.raises(DisprovedError):
        trial.try_quickly(right.replace(cuts={**right.cuts, "narrow.weight": row}))
    assert not trial._made
    assert trial.conditions().prove(right).partial == ()


class Reads(Windows):
    """Tells how many rows each run takes, and does what a test says with its arguments beside."""

    def __init__(self, beside: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, windows: Tensor, mask: Tensor) -> Tensor:
        _rows.append(len(windows))
        self.beside(windows)
        return super().forward(windows, mask)


_rows: list[int] = []


@pytest.mark.parametrize(
    ("beside", "most"),
    [
        (lambda windows: None, 3),
        (lambda windows: float(windows.shape[0]), 3),
        (lambda windows: windows.mul(2) if len(windows) > 999 else windows.flip(1).sum(), 20),
    ],
)
def test_what_code_reads_is_found_with_fewer_rows(beside: Callable[[Tensor], Any], most: int) -> None:
    module, call = Reads(beside), call_of()
    values = ScopeValues(module)
    few = experiment_with_fewer_rows(module, call, 2, values, only_asks=True)
    _rows.clear()
    found = Experiment(module, call, 2, values=values, only_asks=True).asks(few)
    assert _rows.count(3072) <= most
    expected = Experiment(module, call, 2, values=values, only_asks=True).asks()
    assert (found.sizes, found.values, found.is_same) == (expected.sizes, expected.values, expected.is_same)
    assert 1024 in found.sizes  # the number of masks is read by `len`
