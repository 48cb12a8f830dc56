"""Bytes that a plan is expected to send, beside the formulas that runs are compared with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.hardware import load_cluster
from meshwright.hardware.cluster import HOST_DEVICE
from meshwright.hardware.efficiency import efficiency_of
from meshwright.plan.costs.setup import Setup
from meshwright.plan.costs.step_costs import StepCosts
from meshwright.spec import LayerSpec, ModelSpec, OperatorSpec, Plan, TrainSpec
from meshwright.traffic import NORM_BYTES, WHOLE_BELOW_BYTES, replica_copy_bytes, sharded_bytes, tensor_bytes


def sent(model: ModelSpec, plan: Plan, batch: int, *, on_host: bool = False) -> dict[str, float]:
    cluster = load_cluster("8xa100-80g")
    if on_host:
        cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, name=HOST_DEVICE))
    setup = Setup.of(model, plan, TrainSpec(global_batch_size=batch))
    return StepCosts(model, cluster, efficiency_of("a100-sxm-80gb")).cost(setup).sent_bytes


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_sends_what_the_layouts_formula_says(tp: int, micro_batches: int) -> None:
    blocks, hidden, batch, length = 3, 64, 8, 16
    model = ModelSpec.transformer(layers=blocks, hidden=hidden, heads=4, vocab=128, sequence=length, gated=True)
    formula = tensor_bytes(
        batch * length,
        hidden,
        4,
        regions=0,
        regions_on_slices=2 * blocks,
        chains=1,
        embeddings=1,
        heads=1,
        partial_bytes=2 * blocks * hidden * 4,
    )
    expected = formula.sent_bytes(tp) - 2 * (tp - 1) / tp * NORM_BYTES  # which depends on max_grad_norm
    assert sent(model, Plan(tp=tp, micro_batches=micro_batches), batch)["tp"] == pytest.approx(expected, rel=1e-12)


def test_biases_of_row_products_on_slices_are_summed_too() -> None:
    with_biases, without = (
        ModelSpec.transformer(layers=2, hidden=64, heads=4, vocab=128, sequence=16, bias=bias) for bias in (True, False)
    )
    more = sent(with_biases, Plan(tp=2), 4)["tp"] - sent(without, Plan(tp=2), 4)["tp"]
    assert (
        more == 2 * 2 * 64 * 4
    )  # two row products in each of two blocks; an all-reduce over two ranks sends its tensor once


def in_float64(model: ModelSpec) -> ModelSpec:
    def double(layer: LayerSpec) -> LayerSpec:
        sizes = ("params_bytes", "output_bytes", "activation_bytes")
        return layer.replace(**{name: 2 * getattr(layer, name) for name in sizes})

    return model.replace(
        layers=tuple(map(double, model.layers)),
        shared=tuple(one.replace(params_bytes=2 * one.params_bytes) for one in model.shared),
    )


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(pp=2, micro_batches=2), Plan(tp=2, pp=2, micro_batches=2)], ids=str)
def test_gradients_that_several_ranks_sum_have_the_size_of_the_models_own_elements(plan: Plan) -> None:
    model = ModelSpec.transformer(layers=3, hidden=64, heads=4, vocab=128, sequence=16, tied=True, bias=False)
    for axis in ("tp", "pp"):
        # A loss over a divided vocabulary sums its parts in fp32 in either.
        parts = 2 * (1 / 2) * 3 * 4 * (16 * 4) / plan.pp if axis == "tp" and plan.tp > 1 else 0.0
        single, double = (sent(one, plan, 4)[axis] for one in (model, in_float64(model)))
        assert double + parts == pytest.approx(2 * single, rel=1e-12), axis


def test_columns_that_no_row_product_sums_are_gathered() -> None:
    column = OperatorSpec(kind="matmul", rows=1, inner=32, columns=48, num_params=32 * 48, split="columns")
    last = OperatorSpec(kind="matmul", rows=1, inner=48, columns=8, num_params=48 * 8)
    model = ModelSpec(
        name="two",
        layers=(
            LayerSpec(name="one", num_params=32 * 48, params_bytes=128 * 48, output_bytes=192, operators=(column,)),
            LayerSpec(name="two", num_params=48 * 8, params_bytes=192 * 8, output_bytes=32, operators=(last,)),
        ),
    )
    assert sent(model, Plan(tp=2), 10)["tp"] == 10 * (
        48 * 4 / 2 + 32 * 4
    )  # results gathered; the input's gradient summed


@pytest.mark.parametrize(("whole_below", "is_sharded"), [(None, (True, False)), (0, (True, True))])
def test_zero_3_leaves_small_layers_whole(whole_below: int | None, is_sharded: tuple[bool, bool]) -> None:
    sizes = (WHOLE_BELOW_BYTES // 4, WHOLE_BELOW_BYTES // 4 - 1)
    layers = tuple(LayerSpec(name=str(size), num_params=size, params_bytes=4 * size) for size in sizes)
    plan = Plan(dp=4, zero=3, whole_below=whole_below)
    gathered = sum(4 * size for size, one in zip(sizes, is_sharded, strict=True) if one)
    total = 4 * sum(sizes)
    expected = sharded_bytes(total, total - gathered, gathered, zero=3, shards=4, replicas=1, passes=1)
    assert sent(ModelSpec(name="two", layers=layers), plan, 4)["dp"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("on_host", "others"), [(False, 3), (True, 0)])
def test_replicas_of_one_process_copy_values_and_gradients(on_host: bool, others: int) -> None:
    model = ModelSpec.transformer(layers=2, hidden=64, heads=4, vocab=128, sequence=16)
    plan = Plan.parse("data_parallel", num_devices=4)
    expected = replica_copy_bytes(model.params_bytes, model.params_bytes, others)
    assert sum(sent(model, plan, 8, on_host=on_host).values()) == pytest.approx(expected, rel=1e-12)


class _Block(nn.Module):
    """Convolutions beside a shortcut that is one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.two = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.two(torch.relu(self.one(images)))
        return torch.relu(inner + self.shortcut(images))


def _network() -> nn.Module:
    return nn.Sequential(nn.Sequential(_Block()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def test_convolutions_exchange_their_inputs_and_a_shortcut_is_split_alone() -> None:
    model = mw.describe_model(_network, torch.zeros(2, 8, 8, 8))
    splits = {
        operator.name: operator.split for layer in model.layers for operator in layer.operators if operator.num_params
    }
    assert {name.rpartition(".")[2]: split for name, split in splits.items()} == {
        "one": "columns", "two": "inner", "shortcut": "columns", "": "columns",
    }  # fmt: skip
    # Sums of the second one's results and of the gradients of the first one's input: rows of a product overlap, images do not.
    # The shortcut's result is gathered, which sends a half, and the gradient of its input is summed. Then the gradient of the
    # head's input, and three numbers for the loss.
    assert sent(model, Plan(tp=2), 6)["tp"] == 6 * 4 * (16 * 4 * 4 + 8 * 8 * 8 + 16 * 4 * 4 / 2 + 8 * 8 * 8 + 16 + 3)
