"""Losses of models that draw whenever they run, which no trial can judge; rows that are no samples; sparse buffers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tolerances import FLOAT64
from torch import Tensor, nn

import meshwright as mw
from meshwright.run.losses.drawn import judge_drawn_loss

SAMPLES, WIDTH = 6, 3


class Drawing(nn.Module):
    """Draws while it trains and while it evaluates, as variational autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn_like(x)


class Turned(nn.Module):
    """Gives as many rows as a micro-batch has samples, each of another place of the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(0, 1)


class Sparse(nn.Module):
    """Keeps a sparse matrix, as graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _total(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().sum()


def _mean(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().sum((1,)).mean()


def _turned(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.transpose(0, 1) - batch[1]).square().mean()


def _part_total(outputs: Tensor, batch: Any, weight: float = 0.1) -> Tensor:
    """A mean of squares and a sum of something else, as in a VAE that sums one of its two terms."""
    return (outputs - batch[1]).square().mean() + weight * outputs.square().sum()


def _weighed(outputs: Tensor, batch: Any) -> mw.Loss:
    return mw.Loss((outputs - batch[1]).square().sum(), len(outputs))


def _build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def _losses(kind: type[nn.Module], line: str, loss: Any, dtype: torch.dtype = torch.float64) -> list[float]:
    drawn = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs, targets = drawn.to(dtype)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(lambda: _build(kind).to(dtype), line, loss_fn=loss, optimizer=sgd, seed=3) as model:
        return [model.step((inputs, targets)).loss for _ in range(3)]


def test_a_sum_of_a_model_that_always_draws_is_refused_in_the_first_step() -> None:
    """The watch took a first difference for outputs of another form, and two ranks trained with half the gradient."""
    with pytest.raises(mw.ApplyError, match="a sum over samples, not their mean") as refused:
        _losses(Drawing, "micro_batches=2", _total)
    assert "meshwright.Loss(loss, num_samples)" in str(refused.value)
    fixed = _losses(Drawing, "micro_batches=2", lambda outputs, batch: mw.Loss(_total(outputs, batch), len(batch[1])))
    assert fixed == pytest.approx(_losses(Drawing, "single", _mean), rel=FLOAT64)


def test_outputs_whose_rows_are_no_samples_are_not_taken_for_them_in_the_second_micro_batch() -> None:
    assert _losses(Turned, "micro_batches=2", _turned) == pytest.approx(_losses(Turned, "single", _turned), rel=FLOAT64)


@pytest.mark.parametrize("line", ["single", "micro_batches=2"])
def test_a_sparse_buffer_is_refused_by_name(line: str) -> None:
    with pytest.raises(mw.ApplyError, match="'adjacency' is a sparse tensor") as refused:
        _losses(Sparse, line, _mean)
    assert "to_dense" in str(refused.value)


@pytest.mark.parametrize(("weight", "dtype"), [(0.1, torch.float64), (1e-5, torch.float64), (1e-4, torch.float32)])
def test_one_summed_term_of_a_model_that_always_draws_is_refused(weight: float, dtype: torch.dtype) -> None:
    """It trained with half of that term's gradient; with a small weight, as of a VAE's, nothing was said of it."""
    loss = functools.partial(_part_total, weight=weight)
    with pytest.raises(mw.ApplyError, match="not a mean over samples: with the same random numbers") as refused:
        _losses(Drawing, "micro_batches=2", loss, dtype)
    assert "meshwright.Loss(sum, weight)" in str(refused.value)


def test_a_difference_that_may_be_a_smaller_term_yet_stays_untried() -> None:
    rule: Any = SimpleNamespace(untried="untried", reasons=("untried",), is_given=True, refuses=True, matters=True)
    judge_drawn_loss(rule, [[1.0, [[1.0, 1], [1.00002, 1]], 4e-6, 1e-4]])
    assert rule.reasons == ("untried",)
    judge_drawn_loss(rule, [[1.0, [[1.0, 1], [1.000002, 1]], 4e-6, 1e-4]])
    assert not rule.reasons


@pytest.mark.parametrize("loss", [_mean, _weighed])
def test_a_loss_that_parts_with_the_same_numbers_give_is_not_called_untried(loss: Any) -> None:
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64)
    build = functools.partial(_build, Drawing)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(build, "micro_batches=2", loss_fn=loss, optimizer=sgd) as model:
        model.step((inputs, targets))
        assert not any("could not be tried" in reason for reason in model.plan.reasons)
