"""Vocabularies that are proven with fewer rows: torch's own layers alone, cut as unevenly as the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.apply.tensor.proof.conditions import Conditions
from meshwright.apply.tensor.proof.shards_against_whole import DisprovedError
from meshwright.apply.tensor.search.narrowing import narrow
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import Cut, Region, Role

ROWS, WIDTH = 1001, 6


def ids() -> Call:
    return Call(args=(torch.tensor([[0, 3, 999, 500]]),), kwargs={})


def hidden(width: int = WIDTH) -> Call:
    return Call(args=(torch.randn(1, 4, width, requires_grad=True),), kwargs={})


def region_of(role: Role, names: tuple[str, ...] = ("weight",), rows: int = ROWS) -> Region:
    return Region(scope="", num_units=rows, cuts={n: Cut(dim=0, groups=(rows,)) for n in names}, roles={"": role})


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_as_many_rows_are_left_over_as_before(num_ranks: int) -> None:
    small = narrow(nn.Linear(WIDTH, ROWS), [hidden()], num_ranks)
    assert small is not None
    assert small.num_left < ROWS / 2
    assert small.num_left % num_ranks == ROWS % num_ranks
    (weight, bias) = small.module.parameters()
    assert [tuple(weight.shape), tuple(bias.shape)] == [(small.num_left, WIDTH), (small.num_left,)]
    region = small.region(region_of("head", ("weight", "bias")))
    assert region is not None
    assert Conditions(small.module, small.calls, num_ranks).prove(region).partial == ()


@pytest.mark.parametrize("padding", [None, 7, 999])
def test_ids_and_the_row_of_padding_are_among_the_rows(padding: int | None) -> None:
    small = narrow(nn.Embedding(ROWS, WIDTH, padding_idx=padding), [ids()], 2)
    assert small is not None
    region = small.region(region_of("vocabulary"))
    assert region is not None
    Conditions(small.module, small.calls, 2).prove(region)
    with pytest.raises(DisprovedError):
        Conditions(small.module, small.calls, 2).prove(region.replace(roles={"": "column"}))


def test_the_number_of_rows_is_no_size_of_an_argument() -> None:
    small = narrow(nn.Linear(123, ROWS), [hidden(123)], 2)
    assert small is not None
    assert small.num_left == 125


class Own(nn.Embedding):
    """A user's embedding."""


def _patched() -> nn.Module:
    module: Any = nn.Embedding(ROWS, WIDTH)
    module.forward = lambda given: module.weight[given] * module.num_embeddings
    return module


def _hooked() -> nn.Module:
    module = nn.Embedding(ROWS, WIDTH)
    module.register_forward_hook(lambda _, __, result: result - result.mean())
    return module


def _with_function() -> nn.Module:
    module: Any = nn.Embedding(ROWS, WIDTH)
    module.scale = torch.tanh
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: Own(ROWS, WIDTH),
        _patched,
        _hooked,
        _with_function,
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, ROWS)),
        lambda: nn.Embedding(200, WIDTH),
        lambda: nn.Bilinear(WIDTH, WIDTH, ROWS),
    ],
)
def test_layers_of_the_user_and_small_ones_are_proven_as_they_are(build: Any) -> None:
    assert narrow(build(), [ids()], 2) is None


def test_a_value_that_a_library_notes_on_a_layer_changes_nothing() -> None:
    module: Any = nn.Embedding(ROWS, WIDTH)
    module._is_initialized = True
    assert narrow(module, [ids()], 2) is not None


@pytest.mark.parametrize(
    "region",
    [
        region_of("column"),
        region_of("head", rows=500),
        region_of("head").replace(cuts={"weight": Cut(dim=1, groups=(WIDTH,))}),
        region_of("head").replace(integers=(("", "out_features"),)),
    ],
)
def test_other_cuts_are_proven_on_the_layer_as_it_is(region: Region) -> None:
    small = narrow(nn.Linear(WIDTH, ROWS), [hidden()], 2)
    assert small is not None
    assert small.region(region) is None


class Speech(nn.Module):
    """An embedding and a head, tied."""

    def __init__(self, kind: type[nn.Embedding]) -> None:
        super().__init__()
        self.tokens, self.head = kind(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.tokens(given))


def test_a_search_finds_the_same_with_fewer_rows() -> None:
    given = torch.tensor([[0, 3, 999, 500]])

    def found(kind: type[nn.Embedding]) -> Any:
        layout = Search(Speech(kind).double(), 2, lambda module: module(given)).layout()
        return [region.to_dict() for region in layout.regions]

    assert found(nn.Embedding) == found(Own) != []
