"""GradientAccumulation, the building block for people with a loop of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity import cases, losses
from tests.parity.harness import cut
from tests.parity.models import small_models as models
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _build() -> nn.Module:
    torch.manual_seed(0)
    return models.build_mlp()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_seven_micro_batches_in_windows_of_three(max_grad_norm: float | None) -> None:
    # E039: windows of 3, 3 and 1; the last is stepped on by flush(), as a window of its own size.
    micro_batches = [cases.regression(4, seed) for seed in range(7)]
    model = _build()
    accumulation = mw.GradientAccumulation(model, _sgd(model.parameters()), 3, max_grad_norm=max_grad_norm)
    stepped = [accumulation.step(losses.square(model(x), (x, y))) for x, y in micro_batches]
    assert stepped == [False, False, True, False, False, True, False]
    assert accumulation.flush() is True
    assert accumulation.flush() is False
    windows = [micro_batches[:3], micro_batches[3:6], micro_batches[6:]]
    whole = [tuple(torch.cat(tensors) for tensors in zip(*window, strict=True)) for window in windows]
    expected = testing.oracle_steps(_build, whole, losses.square, max_grad_norm=max_grad_norm)
    testing.assert_parity(_values(model), expected[-1].parameters, FLOAT64)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_unequal_token_counts(accumulation_steps: int) -> None:
    # E001: sequences with 1, 2, 7 and 3 valid labels, one batch however it is cut.
    ids, labels = cases.language(4, seed=3)
    labels = labels.clone()
    for row, valid in zip(labels, [1, 2, 7, 3], strict=True):
        row[valid:] = -100
    torch.manual_seed(0)
    model = models.build_untied_gpt()
    accumulation = mw.GradientAccumulation(model, _sgd(model.parameters()), accumulation_steps)
    pieces = cut((ids, labels), [4 // accumulation_steps] * accumulation_steps)
    for piece in pieces:
        accumulation.step(losses.valid_tokens(model(piece[0]), piece))
    expected = testing.oracle_steps(models.build_untied_gpt, [(ids, labels)], losses.valid_tokens)[0]
    testing.assert_parity({n: p.grad for n, p in model.named_parameters()}, expected.gradients, FLOAT64)
    testing.assert_parity(_values(model), expected.parameters, FLOAT64)


def test_a_window_with_scalars_of_unequal_batches_is_their_mean() -> None:
    # The control of the test above: plain scalars count alike, which is not what one batch would give.
    model = _build()
    accumulation = mw.GradientAccumulation(model, _sgd(model.parameters()), 2)
    batch = cases.regression(5, 0)
    for piece in cut(batch, [4, 1]):
        accumulation.step(losses.square(model(piece[0]), piece))
    expected = testing.oracle_steps(_build, [batch], losses.square)[0]
    with pytest.raises(AssertionError, match="differ by more than"):
        testing.assert_parity(_values(model), expected.parameters, 1e-3)


def test_an_error_within_a_window_does_not_spoil_the_next() -> None:
    model = _build()
    accumulation = mw.GradientAccumulation(model, _sgd(model.parameters()), 2)
    batches = [cases.regression(4, seed) for seed in range(3)]
    accumulation.step(losses.square(model(batches[0][0]), batches[0]))
    with pytest.raises(RuntimeError, match="shape"):
        accumulation.step(losses.square(model(batches[1][0][:, :3]), batches[1]))
    assert accumulation.step(losses.square(model(batches[1][0]), batches[1]))
    whole = tuple(torch.cat(tensors) for tensors in zip(*batches[:2], strict=True))
    expected = testing.oracle_steps(_build, [whole], losses.square)[0]
    testing.assert_parity(_values(model), expected.parameters, FLOAT64)


def test_mixed_kinds_of_loss_and_empty_windows_are_refused() -> None:
    model = _build()
    optimizer = _sgd(model.parameters())
    with pytest.raises(mw.ConfigError, match="at least 1"):
        mw.GradientAccumulation(model, optimizer, 0)
    accumulation = mw.GradientAccumulation(model, optimizer, 2)
    x, y = cases.regression(4, 0)
    accumulation.step(losses.square(model(x), (x, y)))
    with pytest.raises(mw.ConfigError, match=r"meshwright\.Loss"):
        accumulation.step(mw.Loss((model(x) - y).square().sum(), 20))
