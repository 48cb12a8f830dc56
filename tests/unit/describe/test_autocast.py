"""Descriptions under autocast to bfloat16: against real runs on the CPU, torch's lists of operators, and costs by hand."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from gpt import GPT, GPTConfig
from meshwright.describe import cast_kernels
from meshwright.describe.describing import describe_model
from meshwright.errors import ConfigError
from meshwright.hardware import ClusterSpec, load_cluster
from meshwright.spec.model import Autocast
from unit.describe.measured import kept_by_layers, kept_bytes
from unit.describe.modules import Mlp, Tied, convnet, floats_of, ids_of
from unit.plan.ideal import ideal_with


def gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(num_layers=2, hidden_size=32, vocabulary_size=64, tie_embeddings=False, dropout=dropout))


def of_a_classifier(num_samples: int):
    return torch.randn(num_samples, 3, 8, 8), torch.arange(num_samples) % 10


def cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


CASES = {
    "mlp": (Mlp, lambda n: floats_of(n, 5, 8), None),
    "convnet with a loss": (convnet, of_a_classifier, cross_entropy),
    "gpt": (gpt, ids_of, None),
    "gpt with dropout": (functools.partial(gpt, 0.5), ids_of, None),
    "tied": (Tied, ids_of, None),
    "encoder": (
        functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True),
        lambda n: floats_of(n, 6, 16),
        None,
    ),
}


ROTARY = 2 * 2 * 12 * 8 * 2  # sines and cosines for queries and keys, of 12 tokens in bfloat16, two layers
COPIES_OF_TABLES = {"gpt": ROTARY, "gpt with dropout": ROTARY}


def kept_under_autocast(module: nn.Module, batch, loss_fn) -> int:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return kept_bytes(module, batch, loss_fn)


def casts_of(spec: mw.ModelSpec) -> int:
    return sum(operator.cast_saved_bytes for layer in spec.layers for operator in layer.operators)


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_are_those_of_a_real_run(name: str) -> None:
    build, make_batch, loss_fn = CASES[name]
    spec = describe_model(build, make_batch(2), loss_fn=loss_fn, autocast="cpu")
    module = build()

    def kept(run) -> tuple[float, float]:
        """Return what a sample adds, and what does not grow with the samples."""
        two, four = (run(module, make_batch(count), loss_fn) for count in (2, 4))
        return (four - two) / 2, two - (four - two)

    each, fixed = kept(kept_under_autocast)
    assert kept_by_layers(spec) == each > 0
    tables = kept(kept_bytes)[1]  # tables, and sums of norms and of the loss, which are in fp32 in any case
    assert casts_of(spec) == fixed - tables - COPIES_OF_TABLES.get(name, 0) > 0


def test_an_mlp_by_hand() -> None:
    spec = describe_model(Mlp, floats_of(2, 5, 8), autocast="cpu")
    up, down = spec.layers
    cast, product, relu = up.operators
    assert (cast.function, cast.dtype, cast.traffic_bytes, cast.saved_bytes) == ("_to_copy", "bf16", 5 * 8 * 6, 0)
    assert (product.dtype, product.num_casts, product.cast_params) == ("bf16", 2, 8 * 16 + 16)
    assert product.cast_saved_bytes == 0  # nobody asks for the gradient of the input
    assert product.num_params == 8 * 16 + 16
    assert (relu.dtype, relu.traffic_bytes) == ("bf16", 2 * 5 * 16 * 2)
    (last,) = down.operators
    assert (last.num_casts, last.cast_params, last.cast_saved_bytes) == (1, 8 * 16, 2 * 8 * 16)
    assert (down.output_bytes, down.output_elements) == (5 * 8 * 2, 5 * 8)
    assert mw.ModelSpec.from_json(spec.to_json()) == spec


def test_splits_and_work_are_those_without_autocast() -> None:
    plain, cast = (describe_model(gpt, ids_of(2), autocast=kind) for kind in ("none", "cuda"))
    assert cast.forward_flops == plain.forward_flops
    assert cast.num_params == plain.num_params
    assert cast.bonds == plain.bonds
    for one, other in zip(plain.layers, cast.layers, strict=True):
        first, second = (
            [(op.name, op.split, op.num_params) for op in layer.operators if op.kind == "matmul"]
            for layer in (one, other)
        )
        assert first == second
        assert sum(op.num_params for op in other.operators) == other.num_params
        assert sum(op.saved_bytes for op in other.operators) == other.activation_bytes


class Mixed(nn.Module):
    """Operators that autocast treats each in its own way, on a product's result in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.norm(self.linear(x))
        return (self.linear(x).softmax(-1) + self.linear(x).exp()).sum(-1)


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("cpu", {"native_layer_norm": "bf16", "_softmax": "bf16", "exp": "bf16", "sum": "bf16"}),
        ("cuda", {"native_layer_norm": "fp32", "_softmax": "fp32", "exp": "fp32", "sum": "fp32"}),
        ("none", {"native_layer_norm": "fp32", "_softmax": "fp32", "exp": "fp32", "sum": "fp32"}),
    ],
)
def test_norms_and_softmax_are_cast_on_cuda_devices(kind: Autocast, dtypes: dict[str, str]) -> None:
    spec = describe_model(Mixed, floats_of(2, 3, 8), autocast=kind)
    found = {op.function: op.dtype for layer in spec.layers for op in layer.operators if op.function in dtypes}
    assert found == dtypes
    assert {op.dtype for layer in spec.layers for op in layer.operators if op.kind == "matmul"} == {
        "fp32" if kind == "none" else "bf16"
    }


def test_the_cpus_own_autocast_is_as_before_afterwards() -> None:
    def result() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.randn(2, 8, dtype=torch.bfloat16).softmax(-1).dtype

    before = result()
    with cast_kernels.under_autocast("cuda"):
        inside = torch.randn(2, 8, dtype=torch.bfloat16).softmax(-1).dtype
    assert (before, inside, result()) == (torch.bfloat16, torch.float32, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), cast_kernels.under_autocast("cuda"):
        raise ZeroDivisionError
    assert result() == torch.bfloat16


def test_the_listed_operators_are_those_of_cudas_autocast() -> None:
    names = [
        *cast_kernels._IN_FLOAT32,
        *cast_kernels._WITH_DTYPE,
        *cast_kernels._IN_BFLOAT16,
        *cast_kernels._IN_THE_WIDEST,
    ]
    assert len(set(names)) == len(names)
    missing = [
        name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
    ]
    assert missing == []


def test_operators_are_asked_for_float32_once() -> None:
    values = torch.randn(2, 8, dtype=torch.bfloat16)
    with cast_kernels.under_autocast("cuda"):
        assert values.sum(dtype=torch.bfloat16).dtype == torch.bfloat16  # as the call says
        assert values.sum().dtype == values.sum(-1).dtype == torch.float32
        assert values.softmax(-1, torch.bfloat16).dtype == torch.bfloat16
        assert values.double().exp().dtype == torch.float64  # doubles are left alone
        assert torch.arange(3).sum().dtype == torch.int64
        assert torch.addcmul(values.float(), values, values).dtype == torch.float32


# -- costs -------------------------------------------------------------------------------------------------------------


def host(**changes: object) -> ClusterSpec:
    device = mw.DeviceSpec(
        name="cpu", peak_flops_per_s={"fp32": 1e15, "bf16": 1e15}, memory_bytes_per_s=1e9, memory_bytes=8 * 2**30
    )
    return ClusterSpec(name="host", device=device, devices_per_host=1, efficiency=ideal_with(**changes))


def predicted(kind: Autocast, line: str = "single,precision=bf16", **changes: object) -> mw.Prediction:
    spec = describe_model(Mlp, floats_of(2, 5, 8), autocast=kind)
    plan = mw.Plan.parse(line)
    train = mw.TrainSpec(global_batch_size=4, precision=plan.precision)
    return mw.predict_plan(spec, host(**changes), train, plan)


def test_casts_take_their_bytes_forward_and_back() -> None:
    forward = 6 * (4 * 5 * 8) + 6 * (8 * 16 + 16) + 6 * 8 * 16  # the input, both weights and a bias
    relu = 2 * 2 * 4 * 5 * 16
    products = 2 * (4 * 5 * 8 + 8 * 16 + 4 * 5 * 16) + 2 * (4 * 5 * 16 + 16 * 8 + 4 * 5 * 8)
    time = predicted("cpu").time
    assert time.forward_s == pytest.approx((forward + relu + products) / 1e9)
    assert time.backward_s == pytest.approx((forward + 1.5 * relu + 2 * products) / 1e9)
    assert predicted("none").time.forward_s == pytest.approx((relu + products) / 1e9)


def test_casts_take_a_part_of_an_operators_host_time() -> None:
    plain, slow = (predicted("cpu", operator_s=seconds).time.forward_s for seconds in (0.0, 1.0))
    assert slow - plain == pytest.approx(
        3 + 0.3 * 4
    )  # two products and ReLU; casts of the input, two weights and a bias


def test_copies_of_weights_are_kept_for_each_forward_and_not_through_recompute() -> None:
    kept = 4 * (5 * 8 * 2 + 5 * 16 * 2)  # the cast input, and ReLU's result
    assert predicted("cpu").memory.activations_bytes == kept + 2 * 8 * 16
    assert predicted("cpu", "single,precision=bf16,micro_batches=4").memory.activations_bytes == kept / 4 + 2 * 8 * 16
    full = predicted("cpu", "single,precision=bf16,recompute=full").memory
    assert full.activations_bytes <= kept


def test_a_plan_in_fp32_is_refused_for_it() -> None:
    with pytest.raises(ConfigError, match="described under autocast") as caught:
        predicted("cuda", "single")
    assert caught.value.fix is not None
    assert 'autocast="none"' in caught.value.fix


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="rule: none, cpu or cuda"):
        describe_model(Mlp, floats_of(2, 5, 8), autocast="mps")  # type: ignore[arg-type]


def test_a_guess_from_fp32_says_so() -> None:
    train = mw.TrainSpec(global_batch_size=4, precision="bf16")
    guess, seen = (
        mw.make_plans(describe_model(Mlp, floats_of(2, 5, 8), autocast=kind), load_cluster("1xa100-80g"), train)[
            0
        ].reasons
        for kind in ("none", "cuda")
    )
    assert any("described without autocast" in reason for reason in guess)
    assert not any("autocast" in reason for reason in seen)


def test_a_cluster_says_which_autocast_is_its_own() -> None:
    assert host().autocast("bf16") == "cpu"
    assert load_cluster("8xh100-sxm").autocast("bf16") == "cuda"
    assert load_cluster("8xh100-sxm").autocast("fp32") == "none"
