"""Types of layers that run on slices of the batch or of the sequence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.apply.tensor.tensor_type_cases import PAIR, WIDTH, Between, experiment_of
from torch import Tensor, nn

from meshwright.apply.tensor.attention import attention_region
from meshwright.apply.tensor.proof.proof import DisprovedError, Experiment
from meshwright.apply.tensor.search.trace import Call
from meshwright.apply.tensor.tensor_layout import Chain, TensorLayout
from meshwright.apply.tensor.types.report import TypeReport


class Layer(nn.Module):
    """A layer between whose regions something stands."""

    def __init__(self, before: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Between(lambda _, h: h.relu())
        self.before = before
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.before(self, x)))


def on_slices(before: Callable[[Any, Tensor], Tensor], length: int, dim: int = 1) -> tuple[Experiment, TensorLayout]:
    experiment = experiment_of(Layer(before), (4, length, WIDTH))
    return experiment, TensorLayout(regions=(PAIR.above("mlp"),), chains=(Chain(layers=("",), dims=(dim,)),))


def check_on_slices(before: Callable[[Any, Tensor], Tensor], length: int, dim: int = 1) -> TypeReport:
    experiment, layout = on_slices(before, length, dim)
    assert set(experiment.check(layout)) >= {"norm.weight", "norm.bias"}
    return experiment.check_types(layout)


def test_a_bias_of_attention_is_added_on_slices() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    experiment = Experiment(layer.double(), Call(args=(torch.randn(4, 6, 8).double().requires_grad_(),), kwargs={}), 2)
    region = attention_region(layer.self_attn).above("self_attn")
    for dim in (0, 1):
        layout = TensorLayout(regions=(region,), chains=(Chain(layers=("",), dims=(dim,)),))
        assert "self_attn.out_proj.bias" in experiment.check(layout)
        assert "self_attn.out_proj.bias" in experiment.check_types(layout).partial
    whole = TensorLayout(regions=(region,))
    assert "self_attn.out_proj.bias" not in experiment.check_types(whole).partial | set(experiment.check(whole))


def _by_length(_: Any, x: Tensor) -> Tensor:
    return x - 0 * x.amax(1, keepdim=True) if x.shape[1] > 8 else x


@pytest.mark.parametrize("dim", [0, 1])
def test_a_layer_that_treats_each_position_alike_runs_on_slices(dim: int) -> None:
    assert not check_on_slices(lambda _, x: x.relu() + 1, 8, dim).refusals


def test_a_branch_on_the_length_that_slices_take_otherwise_is_refused() -> None:
    assert not check_on_slices(_by_length, 8).refusals
    with pytest.raises(DisprovedError, match=r"comes out otherwise|another path|goes over the sharded dim"):
        check_on_slices(_by_length, 12)


def test_an_auxiliary_loss_of_a_slice_is_refused() -> None:
    def keep(m: Any, x: Tensor) -> Tensor:
        m.aux = (x.mean((0, 1)) ** 2).sum()
        return x

    def keep_sum(m: Any, x: Tensor) -> Tensor:
        m.aux = x.detach().sum()
        return x

    for before in (keep, keep_sum):
        experiment, layout = on_slices(before, 8)
        assert re.search(r"goes over the sharded dim|kept as 'aux'", experiment.check_types(layout).refusals[0])
        with pytest.raises(DisprovedError, match="what is left in 'aux'"):
            check_on_slices(before, 8)


def test_samples_that_are_mixed_are_refused_on_slices_of_the_batch() -> None:
    assert check_on_slices(lambda _, x: x + 0 * x.mean(0), 8, 1)
    with pytest.raises(DisprovedError, match="goes over the sharded dim 0"):
        check_on_slices(lambda _, x: x + 0 * x.mean(0), 8, 0)
