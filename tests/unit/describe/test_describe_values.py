"""Modules that need values, that cannot be described, or that must be left as they were."""

from __future__ import annotations

import copy
import ctypes
import functools
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.describe.describing import REAL_BYTES, describe_model
from unit.describe.measured import counted_flops
from unit.describe.modules import Experts, Mlp, convnet, floats_of


def test_routing_by_values_runs_for_real_and_says_so() -> None:
    batch = floats_of(4, 6, 8)
    spec = describe_model(Experts, batch)
    assert any("the model was run for real with the 4 samples" in note for note in spec.notes)
    rows = 4 * 6  # each goes to one expert
    assert spec.forward_flops == pytest.approx((2 * rows * 8 * 4 + 2 * rows * 2 * 8 * 16) / 4, rel=1e-12)
    assert sum(layer.num_params for layer in spec.layers) == sum(p.numel() for p in Experts().parameters())


def test_a_large_model_that_needs_values_is_refused_with_its_place() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, REAL_BYTES // 16)
            self.second = Experts()

        def forward(self, x):
            self.first(x)
            return self.second(x)

    with pytest.raises(mw.ConfigError, match=r"'second' needs values.*rule: at most 1 GiB") as caught:
        describe_model(Large, floats_of(2, 3, 8))
    assert "fewer or smaller layers" in caught.value.fix


def test_an_integer_that_a_mask_gives_needs_no_real_run() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids, mask):
            x = self.table(ids)
            return x if mask.all() else x * mask[..., None]

    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3, dtype=torch.bool)}
    spec = describe_model(Masked, batch)
    assert not spec.notes
    assert not any(op.name == "mul" for op in spec.layers[0].operators)


def test_the_users_own_error_is_shown() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x[..., :4])

    with pytest.raises(mw.UserCodeError, match="RuntimeError") as caught:
        describe_model(Broken, floats_of(2, 8))
    assert "forward" in caught.value.traceback_text


def test_errors_of_building_and_of_the_loss_are_told_apart_and_short() -> None:
    def build() -> nn.Module:
        return nn.Linear(8)  # pyright: ignore[reportCallIssue]

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        raise KeyError(str(outputs.tolist()) * 100)

    with pytest.raises(mw.UserCodeError, match=r"builds the model raised TypeError(?s:.*)fix: .*model\.kwargs"):
        describe_model(build, floats_of(2, 8))
    with pytest.raises(mw.UserCodeError, match="the loss raised KeyError") as caught:
        describe_model(lambda: nn.Linear(8, 8), (floats_of(2, 8)[0], torch.zeros(2)), loss_fn=loss)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("build", "batch", "message"),
    [
        (lambda: 3, (torch.zeros(2, 8),), r"build_model returned int \(rule: an nn.Module\)"),
        (Mlp, (torch.zeros(0, 8),), r"0 samples \(rule: at least 1\)"),
        (Mlp, ({"x": torch.zeros(2, 8), "y": torch.zeros(3, 8)},), "different sizes in dim 0"),
        (Mlp, (torch.zeros(2, 8),) * 3, "must be a pair"),
    ],
)
def test_what_cannot_be_described_is_refused(build, batch, message: str) -> None:
    with pytest.raises(mw.ConfigError, match=message) as caught:
        describe_model(build, batch)
    assert caught.value.fix


def test_a_sequence_that_the_batch_has_not_is_refused() -> None:
    with pytest.raises(mw.ConfigError, match=r"sequence_length=7, but dim 1 of the batch's tensors is \[5\]"):
        describe_model(Mlp, floats_of(2, 5, 8), sequence_length=7)
    assert describe_model(Mlp, floats_of(2, 5, 8), sequence_length=5).sequence_length == 5


def test_a_given_module_is_not_changed() -> None:
    model = convnet()
    norm = model[0][1]
    plain = norm.forward

    def noted(x):
        norm.last = x.shape
        return plain(x)  # runs the norm of the model itself, in a copy too

    norm.forward = noted
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    spec = describe_model(model, floats_of(2, 3, 8, 8))
    torch.set_rng_state(state)
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(norm, "last")
    assert norm.forward is noted
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def test_no_memory_is_taken() -> None:
    spec = describe_model(lambda: nn.Sequential(nn.Linear(1 << 17, 1 << 17)), (torch.zeros(1, 1 << 17),))
    assert spec.params_bytes > 1 << 36


def test_a_module_whose_forward_calls_none_of_its_layers_is_one_layer() -> None:
    build = functools.partial(nn.MultiheadAttention, 16, 4, batch_first=True)
    batch = {name: torch.ones(2, 5, 16) for name in ("query", "key", "value")}
    (layer,) = describe_model(build, batch).layers
    assert (layer.name, layer.num_params) == ("model", sum(parameter.numel() for parameter in build().parameters()))
    assert layer.forward_flops == counted_flops(build(), batch) / 2 > 0


def test_a_built_module_that_cannot_be_copied_is_refused_and_its_builder_taken() -> None:
    class Locked(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    batch = floats_of(2, 8)
    with pytest.raises(mw.ConfigError, match="is already built and cannot be copied") as caught:
        describe_model(Locked(), batch)
    assert caught.value.fix == "pass a function that builds it"
    assert describe_model(Locked, batch).forward_flops == 2 * 2 * 8 * 16


def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(mw.ConfigError, match="operators cannot be watched"):
        describe_model(torch.jit.script(nn.Sequential(nn.Linear(8, 4))), floats_of(2, 8))


def test_drop_rates_made_as_tensors_need_no_values() -> None:
    class Rates(Mlp):
        def __init__(self) -> None:
            super().__init__(width=64, inner=128)
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]

    assert "products are proposed: 1;" in describe_model(Rates, floats_of(2, 64)).notes[0]


def test_a_function_that_returns_one_module_again_does_not_have_it_changed() -> None:
    model = Mlp()
    describe_model(lambda: model, floats_of(2, 8))
    assert all(type(parameter.data) is torch.Tensor for parameter in model.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def test_a_batch_size_that_the_model_fixes_is_told() -> None:
    class Fixed(Mlp):
        def forward(self, x):
            return super().forward(x.view(4, 8))

    spec = describe_model(Fixed, floats_of(4, 8))
    assert any("run with the 4 samples of the example batch" in note for note in spec.notes)
    assert spec.forward_flops == 2 * 2 * 8 * 16


def test_a_parameter_of_no_layer_is_told() -> None:
    class Positions(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(5, 8))

        def forward(self, x):
            return super().forward(x + self.positions)

    spec = describe_model(Positions, floats_of(2, 5, 8))
    assert spec.layers[0].num_params == 5 * 8 + 8 * 16 + 16
    assert "'positions' belongs to no layer; it is counted in 'up', which uses it first" in spec.notes


def test_what_a_forward_draws_from_python_and_numpy_is_not_drawn_from_the_program() -> None:
    class Draws(Mlp):
        def forward(self, x):
            return super().forward(x) * random.random() * float(np.random.rand())

    random.seed(1)
    np.random.seed(1)
    describe_model(Draws, floats_of(2, 5, 8))
    found = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    assert found == (random.random(), np.random.rand())


class AsksForAnAddress(nn.Module):
    """A layer whose code is not torch's and writes at an address; of a fake tensor there is none."""

    def __init__(self, *, by_dlpack: bool) -> None:
        super().__init__()
        self.a, self.by_dlpack = nn.Linear(4, 4), by_dlpack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.by_dlpack:
            torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach())).mul_(0.5)
        else:
            ctypes.c_float.from_address(x.data_ptr()).value = 1.0
        return x


@pytest.mark.parametrize("by_dlpack", [True, False])
def test_a_layer_that_writes_at_an_address_runs_for_real(by_dlpack: bool) -> None:
    # With torch's default the address is 0, and this process ends.
    spec = describe_model(functools.partial(AsksForAnAddress, by_dlpack=by_dlpack), (torch.zeros(2, 4),))
    assert "the model was run for real" in spec.notes[0]


def test_buffers_and_kept_tensors_are_counted_once() -> None:
    class Keeps(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(100))
            self.tables = [torch.ones(50), torch.ones(1).expand(30)]
            self.weights = [next(self.parameters())]  # not again

    spec = describe_model(Keeps, floats_of(2, 5, 8))
    assert spec.buffers_bytes == 4 * (100 + 50 + 1)
    assert mw.ModelSpec.from_json(spec.to_json()) == spec
