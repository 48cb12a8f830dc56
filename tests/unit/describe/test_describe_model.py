"""Descriptions of modules against numbers counted by hand, torch's own count of FLOPs, and what real runs keep."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from gpt import GPT, GPTConfig
from meshwright.describe.describing import describe_model
from unit.describe.measured import counted_flops, growth, kept_by_layers
from unit.describe.modules import Mlp, Tied, TiedByHand, convnet, floats_of, ids_of


def gpt(**changes) -> nn.Module:
    return GPT(
        GPTConfig(**{"num_layers": 2, "hidden_size": 32, "vocabulary_size": 64, "tie_embeddings": False} | changes)
    )


CASES = {
    "mlp": (Mlp, lambda n: floats_of(n, 5, 8)),
    "convnet": (convnet, lambda n: floats_of(n, 3, 8, 8)),
    "gpt": (gpt, ids_of),
    "gpt with dropout": (functools.partial(gpt, dropout=0.5), ids_of),
    "gpt with fewer key heads": (functools.partial(gpt, num_kv_heads=2), ids_of),
    "tied": (Tied, ids_of),
    "gru": (functools.partial(nn.GRU, 8, 16, batch_first=True), lambda n: floats_of(n, 5, 8)),
    "encoder": (
        functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True),
        lambda n: floats_of(n, 6, 16),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_torchs_own_count(name: str) -> None:
    build, make_batch = CASES[name]
    spec = describe_model(build, make_batch(2))
    assert spec.forward_flops == counted_flops(build(), make_batch(2)) / 2 > 0


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_are_those_of_a_real_run(name: str) -> None:
    build, make_batch = CASES[name]
    assert kept_by_layers(describe_model(build, make_batch(2))) == growth(build(), make_batch) > 0


@pytest.mark.parametrize("name", CASES)
def test_operators_add_up_to_their_layers(name: str) -> None:
    build, make_batch = CASES[name]
    spec = describe_model(build, make_batch(2))
    for layer in spec.layers:
        assert sum(operator.saved_bytes for operator in layer.operators) == layer.activation_bytes
        assert sum(operator.num_params for operator in layer.operators) == layer.num_params
        # A causal mask halves an operator's arithmetic; a layer's is counted without it, as for MFU.
        whole = sum(op.forward_flops * (2 if op.causal else 1) for op in layer.operators)
        assert whole == layer.forward_flops


def test_an_mlp_by_hand() -> None:
    spec = describe_model(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.zeros(3, 8),))
    first, relu, last = spec.layers
    assert (first.num_params, first.forward_flops, first.output_bytes) == (8 * 16 + 16, 2 * 8 * 16, 16 * 4)
    assert first.activation_bytes == 8 * 4
    assert relu.activation_bytes == 16 * 4  # its result, which the last layer keeps with it
    assert (last.activation_bytes, last.output_bytes) == (0, 4 * 4)
    assert [op.split for layer in spec.layers for op in layer.operators] == ["columns", "inside", "inner"]
    assert relu.operators[0].traffic_bytes == 2 * 16 * 4
    assert spec.num_params == 8 * 16 + 16 + 16 * 4 + 4
    assert mw.ModelSpec.from_json(spec.to_json()) == spec


def test_a_gpt_block_by_hand() -> None:
    spec = describe_model(functools.partial(gpt, num_layers=1), ids_of(2, length=16))
    block = next(layer for layer in spec.layers if layer.name == "layers.0")
    length, width, inner = 16, 32, 96
    matrices = 4 * width * width + 3 * width * inner
    assert block.num_params == matrices + 2 * width
    assert block.forward_flops == 2 * length * matrices + 4 * length**2 * width
    products = {op.name: op for op in block.operators if op.kind == "matmul"}
    assert (products["ffn.up"].rows, products["ffn.up"].inner, products["ffn.up"].columns) == (length, width, inner)
    assert {name: op.split for name, op in products.items()} == {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up"), "columns"),
        **dict.fromkeys(("attention.output", "ffn.down"), "inner"),
    }
    (core,) = (op for op in block.operators if op.is_core)
    assert (core.kind, core.causal, core.count, core.rows, core.columns, core.split) == (
        "attention",
        True,
        4,
        16,
        16,
        "inside",
    )
    assert {op.split for op in block.operators if "norm" in op.name} == {"rows"}
    assert (spec.sequence_length, spec.num_heads, spec.num_kv_heads) == (16, 4, 4)


def test_scores_softmax_and_dropout_are_the_core() -> None:
    block = describe_model(functools.partial(gpt, num_layers=1, dropout=0.5), ids_of(2)).layers[-3]
    core = [op for op in block.operators if op.is_core]
    assert [op.kind for op in core].count("batched_matmul") == 2
    assert [core[0].kind, core[-1].kind] == ["batched_matmul"] * 2
    assert sum(op.saved_bytes for op in core) > 3 * 4 * 12 * 12 * 4  # scores, mask and what it leaves, of four heads


def test_a_convnet_by_hand() -> None:
    spec = describe_model(convnet, floats_of(2, 3, 8, 8))
    flops = [layer.forward_flops for layer in spec.layers]
    products = [op for layer in spec.layers for op in layer.operators if op.kind == "matmul"]
    assert sum(flops) == 2 * 64 * 27 * 8 + 2 * 16 * 36 * 4 * 2 + 2 * 16 * 8 * 16 + 2 * 4 * 10
    grouped = [op for op in products if op.count == 2]
    assert [(op.rows, op.inner, op.columns) for op in grouped] == [(16, 36, 4)]


def test_an_lstm_by_hand() -> None:
    spec = describe_model(functools.partial(nn.LSTM, 8, 16, batch_first=True), floats_of(3, 5, 8))
    (layer,) = spec.layers
    assert layer.name == "model"
    assert any("workspace" in note for note in spec.notes)
    assert layer.num_params == 4 * 16 * (8 + 16) + 2 * 4 * 16
    assert layer.forward_flops == 2 * 5 * 4 * 16 * (8 + 16)
    into, again = (op for op in layer.operators if op.kind == "matmul")
    assert (into.rows, into.inner, into.columns, into.count) == (5, 8, 64, 1)
    assert (again.rows, again.inner, again.columns, again.count) == (1, 16, 64, 5)


def test_many_calls_of_a_cell_are_one_operator() -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x):
            hidden = x[:, 0]
            for step in range(x.shape[1]):
                hidden = self.cell(x[:, step], hidden)
            return hidden

    (layer,) = describe_model(Cells, floats_of(2, 100, 8)).layers
    products = [op for op in layer.operators if op.kind == "matmul"]
    assert sum(op.count for op in products) == 200
    assert len(layer.operators) < 20
    assert layer.forward_flops == 100 * 2 * 2 * 8 * 24


def test_tied_parameters_are_counted_once() -> None:
    spec = describe_model(Tied, ids_of(2))
    assert spec.num_params == sum(parameter.numel() for parameter in Tied().parameters())
    (shared,) = spec.shared
    assert shared.names == ("embedding.weight", "head.weight")
    assert shared.layers == ("embedding", "head")
    assert (spec.vocab_size, spec.hidden_size) == (40, 8)


def test_a_parameter_used_outside_its_layer_is_told() -> None:
    spec = describe_model(TiedByHand, ids_of(2))
    assert spec.num_params == sum(parameter.numel() for parameter in TiedByHand().parameters())
    assert spec.layers[-1].forward_flops == 2 * 12 * (2 * 8 * 16 + 8 * 40)
    assert any("'embedding.weight' of 'embedding' is used outside that layer" in note for note in spec.notes)


def test_a_loss_belongs_to_the_last_layer() -> None:
    def loss_fn(outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def make_batch(num_samples):
        return ids_of(num_samples)[0], ids_of(num_samples)[0]

    spec = describe_model(Tied, make_batch(2), loss_fn=loss_fn)
    assert kept_by_layers(spec) == growth(Tied(), make_batch, loss_fn)
    assert {op.split for op in spec.layers[-1].operators if op.name == "loss"} == {"inside"}


def test_what_does_not_grow_with_the_samples_is_told() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(8))
            self.table = nn.Parameter(torch.zeros(6, 4))
            self.make = nn.Linear(4, 8)

        def forward(self, x):
            return (x * self.scale) * self.make(self.table)

    spec = describe_model(Biased, floats_of(2, 6, 8))
    assert kept_by_layers(spec) == growth(Biased(), lambda n: floats_of(n, 6, 8)) == 2 * 6 * 8 * 4  # x, and x * scale
    assert spec.forward_flops == 0
    assert any(note.startswith("192 B that backward needs do not grow") for note in spec.notes)
    assert any(note.startswith("384 FLOPs of a forward do not grow") for note in spec.notes)


class Contrastive(nn.Module):
    """Each sample is compared with each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(8, 16)

    def forward(self, x, y):
        return self.left(x) @ self.right(y).t()


def test_samples_that_meet_samples_are_those_of_the_example() -> None:
    batch = {"x": torch.zeros(6, 8), "y": torch.zeros(6, 8)}
    spec = describe_model(Contrastive, batch)
    assert spec.forward_flops == counted_flops(Contrastive(), batch) / 6 == 2 * 2 * 8 * 16 + 2 * 16 * 6
    assert any("square of the samples" in note and "6 samples" in note for note in spec.notes)
    assert sum(op.forward_flops for layer in spec.layers for op in layer.operators) == spec.forward_flops


class _Issuing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(4).float()  # two calls, whatever the samples, and nothing for backward
        return self.lin(x).view(-1, 2, 4) + table


@pytest.mark.parametrize("samples", [2, 64])
def test_what_the_host_issues_is_counted_whatever_the_samples(samples: int) -> None:
    (layer,) = mw.describe_model(_Issuing, torch.zeros(samples, 8)).layers
    assert layer.host is not None
    # arange, its cast, a product and a sum; the weight's transpose and the view; the model and its layer. Of these the product
    # and its weight's transpose are issued by the layer, the others by the model's own code.
    assert layer.host.to_dict() == {
        "operators": 4, "differentiated": 2, "views": 2, "differentiated_views": 2, "modules": 2,
        "between": 4,
    }  # fmt: skip
    assert mw.ModelSpec.from_json(mw.describe_model(_Issuing, torch.zeros(samples, 8)).to_json()).layers == (layer,)
