"""What a description says of cuts: layers that a pipeline leaves together, and what tensor parallelism has to split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.describe.describing import describe_model
from meshwright.errors import ConfigError
from meshwright.hardware import load_cluster
from meshwright.plan.search.ranking import make_plans
from meshwright.plan.search.space import Degrees, Task, rule_against
from meshwright.spec import LayerBond, LayerSpec, ModelSpec, TrainSpec
from unit.describe.modules import floats_of, ids_of

TRAIN = TrainSpec(global_batch_size=16)


class Adapted(nn.Module):
    """A product, and a narrow pair beside it that is added to its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(width, 2))
        self.up = nn.Parameter(torch.randn(2, width))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


class AtTheRoot(nn.Module):
    """Two layers with code of the model itself between them, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.first(self.block(x)).relu())


class StopsEarly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 1e9:
                break
        return x


class Chooses(nn.Module):
    """A branch on the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.yes(x) if x.sum() > -1e9 else self.no(x))


class Normalised(nn.Module):
    """A layer with buffers that runs before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.middle(self.norm(x))))


def bonds_of(spec: ModelSpec) -> list[tuple[str, str, str]]:
    return [(bond.first, bond.last, bond.when) for bond in spec.bonds]


def test_layers_of_a_chain_that_are_split_together_are_one_piece_under_tp() -> None:
    chain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    spec = describe_model(chain, floats_of(2, 8))
    assert bonds_of(spec) == [("0", "2", "tensor")]
    assert (spec.num_pieces(under_tp=False), spec.num_pieces(under_tp=True)) == (5, 3)
    assert spec.splits_inside_stages


def test_code_around_layers_runs_on_every_stage() -> None:
    spec = describe_model(AtTheRoot, floats_of(2, 8))
    assert ("first", "second", "around") in bonds_of(spec)
    assert spec.splits_inside_stages  # the block, whose layers are a chain
    without = describe_model(nn.Sequential(*list(AtTheRoot().children())[1:]), floats_of(2, 8))
    assert bonds_of(without) == [("0", "1", "tensor")]


class RootAlone(AtTheRoot):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(8))


def test_nothing_to_split_inside_stages_leaves_tp_with_pp_out() -> None:
    spec = describe_model(RootAlone, floats_of(2, 8))
    assert not spec.splits_inside_stages
    degrees = Degrees(1, 2, 2, 4, 4)
    rejected = rule_against(degrees, Task(spec, load_cluster("4xa100-80g"), TRAIN))
    assert rejected is not None
    assert rejected.rule == "something_to_split_inside_stages"
    assert "tp=2 with pp=2" in rejected.reason


def test_a_sum_that_is_added_to_whole_terms_is_not_split() -> None:
    spec = describe_model(nn.Sequential(Adapted(8), nn.LayerNorm(8)), floats_of(2, 8))
    assert "inner" not in {operator.split for operator in spec.layers[0].operators}


def test_values_that_are_read_between_layers_leave_one_piece() -> None:
    spec = describe_model(StopsEarly, floats_of(2, 8))
    assert spec.num_pieces(under_tp=False) == 1
    assert any("reads values that layers compute" in note for note in spec.notes)
    degrees = Degrees(1, 1, 2, 4, 4)
    rejected = rule_against(degrees, Task(spec, load_cluster("2xa100-80g"), TRAIN))
    assert rejected is not None
    assert "4 layers, which make 1 pieces" in rejected.reason
    assert all(plan.pp == 1 for plan in make_plans(spec, load_cluster("2xa100-80g"), TRAIN, top=1000))


def test_a_branch_on_the_input_and_layers_that_did_not_run_leave_the_others() -> None:
    spec = describe_model(Chooses, floats_of(2, 8))
    assert [layer.runs for layer in spec.layers] == [True, True, False]
    assert spec.num_pieces(under_tp=False) == 2
    assert not any("reads values that layers compute" in note for note in spec.notes)


def test_a_layer_with_buffers_keeps_what_runs_between_its_calls() -> None:
    spec = describe_model(Normalised, floats_of(4, 8))
    assert ("norm", "middle", "always") in bonds_of(spec)
    assert spec.num_pieces(under_tp=False) == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_nothing_to_split(kind) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(8, 16, batch_first=True)

        def forward(self, x):
            return self.cell(x)[0]

    spec = describe_model(Words, floats_of(2, 5, 8))
    assert {operator.split for layer in spec.layers for operator in layer.operators} <= {"whole", "rows"}
    plans = make_plans(spec, load_cluster("2xa100-80g"), TRAIN, top=1000)
    assert all(plan.tp == 1 for plan in plans)


def test_a_weight_that_is_read_outside_of_its_product_is_not_split() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return x @ self.rows.t() + self.rows.sum()

    spec = describe_model(Reads, floats_of(2, 8))
    assert {operator.split for layer in spec.layers for operator in layer.operators} <= {"whole", "rows"}


def test_a_table_is_split_inside_one_stage() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

        def forward(self, ids):
            return self.head(self.words(ids))

    assert describe_model(Tables, ids_of(2)).splits_inside_stages


def test_bonds_of_unknown_layers_are_refused() -> None:
    layers = (LayerSpec(name="one", forward_flops=1.0), LayerSpec(name="two", forward_flops=1.0))
    with pytest.raises(ConfigError, match="a bond names the layer 'three'"):
        ModelSpec(name="x", layers=layers, bonds=(LayerBond(first="one", last="three", when="always"),))
    spec = ModelSpec(name="x", layers=layers, bonds=(LayerBond(first="two", last="one", when="tensor"),))
    assert (spec.num_pieces(under_tp=True), spec.num_pieces(under_tp=False)) == (1, 2)
    assert ModelSpec.from_json(spec.to_json()) == spec
