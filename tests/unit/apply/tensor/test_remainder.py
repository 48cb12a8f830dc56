"""Small layers, and weights that no layer can be cut by: cut or kept in parts, the largest first, until little is whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.parity.jobs.stored_jobs import Writes
from tests.parity.models import stored_models
from tests.unit.apply.tensor.proof_counts import count_proofs
from torch import Tensor, nn

from meshwright.apply.tensor.search.remainder import WHOLE_SHARE
from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.stored import forget_graphs
from meshwright.apply.tensor.tensor_layout import Cut, TensorLayout


class Mixes(nn.Module):
    """A layer that is in no pair, since what it gives is mixed, and that is one of many."""

    def __init__(self, width: int, *, larger: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width) if larger else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x).softmax(-1)
        return x if self.wide is None else x + self.wide(x).softmax(-1).unflatten(-1, (2, -1)).sum(-2)


def _layout(model: nn.Module, x: Tensor, num_tp_ranks: int = 2) -> TensorLayout:
    return Search(model.double(), num_tp_ranks, lambda copy: copy(x)).layout()


def _share_whole(model: nn.Module, layout: TensorLayout) -> float:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes[name] for name in layout.whole) / sum(sizes.values())


def test_many_small_layers_are_cut_until_little_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixes(8, larger=index % 3 == 0) for index in range(120)))
    layout = _layout(model, torch.randn(2, 3, 8, dtype=torch.float64))
    assert _share_whole(model, layout) <= WHOLE_SHARE
    assert sum(name.endswith(".wide.weight") for name in layout.cuts) == 40  # the largest first
    assert any(name.endswith(".layer.weight") for name in layout.whole)  # and no more than that


def test_a_large_head_does_not_hide_small_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Mixes(8) for _ in range(4))), nn.Linear(8, 20_000))
    layout = _layout(model, torch.randn(2, 3, 8, dtype=torch.float64))
    assert sum(name.endswith(".layer.weight") for name in layout.cuts) == 4


def test_where_little_is_whole_nothing_more_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8)]
    counts = count_proofs(monkeypatch)
    layout = _layout(nn.Sequential(*blocks, Small()), torch.randn(2, 3, 32).double())
    assert counts["8"] == counts["8.layer"] == 0
    assert "8.weight" in layout.whole


class Small(nn.Module):
    """A weight that is little beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.softmax(0)).softmax(-1).mean(-1, keepdim=True)


@pytest.mark.parametrize("name", stored_models.BLOCKS)
def test_what_no_layer_can_be_cut_by_is_kept_in_parts(name: str) -> None:
    model = stored_models.build(name)
    layout = _layout(model, stored_models.batch(0)[0])
    assert _share_whole(model, layout) <= WHOLE_SHARE
    assert any(cut.kind == "stored" for _, cut in layout.cuts.values())


class Stepwise(nn.Module):
    """A cell that is called for each token: its weights are put together once, by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        state, given = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            given.append(state)
        return torch.stack(given, 1)


def test_a_module_that_is_called_for_each_token_does_not_put_weights_together_each_time() -> None:
    layout = _layout(nn.Sequential(Stepwise()), torch.randn(2, 5, 16).double())
    assert layout.cuts["0.cell.weight_hh"][0].scope == "0"


def test_parts_lie_along_a_dim_that_the_ranks_divide() -> None:
    layout = _layout(nn.Sequential(Small()), torch.randn(2, 3, 32).double(), 4)
    assert layout.cuts["0.weight"][1] == Cut(dim=0, groups=(32,), kind="stored")
    layout = _layout(nn.Sequential(Small()), torch.randn(2, 3, 32).double(), 3)
    assert "0.weight" in layout.whole


def test_a_weight_that_a_forward_writes_stays_whole() -> None:
    layout = _layout(nn.Sequential(Writes(), nn.Linear(8, 8)), torch.randn(2, 8).double())
    assert "writes into" in layout.whole["0.weight"]


class Looks(nn.Module):
    """Scores of tokens with a table of places that an einsum takes, which no cut of heads fits."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_v, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.places = nn.Embedding(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        table = self.places(places[:, None] + places)
        scores = torch.einsum("bnd,nmd->bnm", F.normalize(self.to_q(x), dim=-1), table)
        return self.out(scores.softmax(-1) @ self.to_v(x).softmax(-1))


def test_a_table_beside_a_pair_that_fails_is_cut_by_itself() -> None:
    torch.manual_seed(0)
    layout = _layout(nn.Sequential(Looks()), torch.randn(2, 5, 16).double())
    assert layout.cuts["0.places.weight"][1].kind == "vocabulary"


def test_what_a_plan_wishes_to_be_whole_does_not_count() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8)]
    model, x = nn.Sequential(*blocks, Small()).double(), torch.randn(2, 3, 32).double()
    wishes = {f"{index}.{layer}.weight": "whole" for index in range(4) for layer in (0, 2)}
    layout = Search(model, 2, lambda copy: copy(x), wishes).layout()
    assert "8.weight" in layout.whole
    assert layout.whole["0.0.weight"] == "the plan says so"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_was_computed_of_whole_weights_is_kept_without_its_graph() -> None:
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    before = vars(module[0])["weight"]
    assert before.grad_fn is not None
    forget_graphs(module)
    after = vars(module[0])["weight"]
    assert after.grad_fn is None
    assert torch.equal(after, before)
    assert module[1].weight.requires_grad
