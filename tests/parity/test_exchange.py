"""What is sent, by the ledger's count: once a step, only what is trained, and as many bytes as the formula says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.models import small_models as models
from torch import nn

import meshwright as mw
from meshwright import testing
from meshwright.apply.data.expected_bytes import foresee_gradients

# What a step agrees on beside the gradients: weights, loss, norm, flags. Generous: gradients are far larger.
_SMALL_BYTES = 1024


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _exchanges(
    build: Callable[[], nn.Module], line: str, max_grad_norm: float | None
) -> dict[str, tuple[int, int, float]]:
    """Count one step's exchanges, after a first one."""
    model = mw.apply_plan(
        build, mw.Plan.parse(line), loss_fn=losses.square, optimizer=_sgd, max_grad_norm=max_grad_norm
    )
    try:
        first, second, _ = cases.CASES["mlp"].batches(12)
        model.step(mw.split_batch(first, model))
        with testing.count_collectives(model) as counts:
            model.step(mw.split_batch(second, model))
        names = {name for name, _ in counts.entries}
        return {name: (counts.calls(name), counts.tensor_bytes(name), counts.sent_bytes(name)) for name in names}
    finally:
        model.close()


def _build_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 401), nn.Tanh(), nn.Linear(401, 5)).double()


def _build_half_frozen() -> nn.Module:
    model = _build_wide()
    model[0].requires_grad_(False)
    return model


def _trainable_bytes(build: Callable[[], nn.Module]) -> int:
    return sum(p.numel() * p.element_size() for p in build().parameters() if p.requires_grad)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients_are_sent_once_and_as_a_ring_sends_them(num_ranks: int) -> None:
    gradient_bytes = _trainable_bytes(_build_wide)
    for exchanges in testing.run_ranks(_exchanges, num_ranks, _build_wide, f"dp={num_ranks}", None):
        _, tensor_bytes, sent_bytes = exchanges["all_reduce"]
        assert gradient_bytes <= tensor_bytes <= gradient_bytes + _SMALL_BYTES
        assert sent_bytes == pytest.approx(tensor_bytes * 2 * (num_ranks - 1) / num_ranks)
        others = sum(sent for name, (_, _, sent) in exchanges.items() if name != "all_reduce")
        assert others <= _SMALL_BYTES


@pytest.mark.parametrize("compress", ["int8", "bf16"])
def test_compressed_gradients_are_foreseen_from_the_shapes_of_tensors(compress: str) -> None:
    foreseen = foresee_gradients(_build_wide(), 2, compress)
    assert foreseen < _trainable_bytes(_build_wide)  # as a ring of two sends them as they are
    for exchanges in testing.run_ranks(_exchanges, 2, _build_wide, f"dp=2,compress={compress}", None):
        sent = sum(sent for _, _, sent in exchanges.values())
        assert foreseen <= sent <= foreseen + _SMALL_BYTES


def test_nothing_is_reduced_before_the_last_micro_batch() -> None:
    # E039: accumulation must not multiply what is sent.
    one = testing.run_ranks(_exchanges, 2, _build_wide, "dp=2", None)
    three = testing.run_ranks(_exchanges, 2, _build_wide, "dp=2,micro_batches=3", None)
    for a, b in zip(one, three, strict=True):
        assert b["all_reduce"][1] - a["all_reduce"][1] <= _SMALL_BYTES
        assert b["all_reduce"][1] < 1.5 * _trainable_bytes(_build_wide)


def test_frozen_parameters_are_not_sent() -> None:
    # E016; the control is the same model without freezing, whose first layer is more than half of it.
    frozen = testing.run_ranks(_exchanges, 2, _build_half_frozen, "dp=2", None)[0]["all_reduce"][1]
    trained = testing.run_ranks(_exchanges, 2, _build_wide, "dp=2", None)[0]["all_reduce"][1]
    assert frozen <= _trainable_bytes(_build_half_frozen) + _SMALL_BYTES
    assert trained - frozen >= 7 * 401 * 8


def test_clipping_sends_no_gradient_again() -> None:
    plain = testing.run_ranks(_exchanges, 2, _build_wide, "dp=2", None)[0]["all_reduce"][1]
    clipped = testing.run_ranks(_exchanges, 2, _build_wide, "dp=2", 0.01)[0]["all_reduce"][1]
    assert clipped - plain <= _SMALL_BYTES


def _exchanges_of_one_process(line: str, devices: list[str]) -> float:
    model = mw.apply_plan(models.build_mlp, mw.Plan.parse(line), loss_fn=losses.square, optimizer=_sgd, devices=devices)
    try:
        model.step(cases.regression(6, 0))
        with testing.count_collectives(model) as counts:
            model.step(cases.regression(6, 1))
        return counts.sent_bytes()
    finally:
        model.close()


def test_one_device_sends_nothing() -> None:
    assert _exchanges_of_one_process("single", ["cpu"]) == 0


def test_layers_over_devices_send_activations() -> None:
    # Two moves of activations forward and back at least, and never as much as the parameters.
    sent = _exchanges_of_one_process("mode=model_parallel,pp=2", ["cpu", "cpu"])
    assert sent > 0
