"""Draws that have no place, in own loops and under plans that leave them to torch: they run as torch does, and are told."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.apply.state import outside

Sgd = functools.partial(torch.optim.SGD, lr=0.1)


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def _rng_reasons(model: mw.ParallelModel) -> list[str]:
    return [reason for reason in model.plan.reasons if reason.startswith("rng")]


class Drops(nn.Module):
    """A layer and a dropout, in a checkpoint or not, whose input may come with a table of other sizes."""

    def __init__(self, *, repeats: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.repeats = repeats

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        del table
        return checkpoint(self.layers, x, use_reentrant=False) if self.repeats else self.layers(x)


@pytest.mark.parametrize("repeats", [False, True])
def test_a_call_without_a_number_of_samples_draws_as_torch_does(repeats: bool) -> None:
    def gradients(rng: Any) -> tuple[list[Tensor], list[str]]:
        with mw.apply_plan(lambda: Drops(repeats=repeats), "single", optimizer=Sgd, rng=rng) as model:
            for table in (None, torch.ones(2, 2)):  # the first call finds what draws
                torch.manual_seed(1)
                model.zero_grad()
                model(torch.ones(4, 3), table).sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None], _rng_reasons(model)

    (found, told), (wanted, nothing) = gradients("global"), gradients("torch")
    assert all(map(torch.equal, found, wanted))
    assert any("no common number of samples" in reason for reason in told)
    assert not nothing


def test_a_repeated_forward_of_another_model_draws_as_it_did() -> None:
    # What the backward of a model beside asks for, in a checkpoint of its own, is not looked up at its cost: torch's generator
    # would have moved on.
    plain = Drops(repeats=True)
    x = torch.randn(4, 3)

    def gradient() -> Tensor:
        torch.manual_seed(2)
        plain.zero_grad()
        plain(x).square().sum().backward()
        assert plain.layers[0].weight.grad is not None
        return plain.layers[0].weight.grad.clone()

    wanted = gradient()
    with mw.apply_plan(Drops, "single", optimizer=Sgd) as model:
        model(torch.ones(4, 3)).sum().backward()  # from now on draws of this thread go through Python
        assert torch.equal(gradient(), wanted)


def test_what_draws_without_a_graph_is_told() -> None:
    with mw.apply_plan(Drops, "single") as model:
        with torch.no_grad():
            model.eval()(torch.ones(4, 3))
        assert not _rng_reasons(model)
        with torch.no_grad():
            model.train()(torch.ones(4, 3))
        assert any("without a graph" in reason for reason in _rng_reasons(model))


class Seeds(nn.Module):
    """Seeds torch's generator before it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(4)
        x = nn.functional.dropout(self.layer(x), 0.5, self.training)
        torch.manual_seed(4)
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


def test_a_forward_that_seeds_the_generator_is_left_to_it() -> None:
    # Repeated, its draws cannot be told apart; as long as numbers by place were asked for by name, that was an error.
    def train(rng: Any) -> tuple[float, list[str]]:
        with mw.apply_plan(Seeds, "recompute=full", loss_fn=_loss, optimizer=Sgd, rng=rng) as model:
            losses = [model.step((torch.ones(4, 3), torch.zeros(4, 3))).loss for _ in range(2)]
            return losses[-1], _rng_reasons(model)

    found, told = train("global")
    assert found == train("torch")[0]
    assert any("seeds torch's generator" in reason for reason in told)


@pytest.mark.parametrize(("p", "is_told"), [(0.5, True), (0.0, False)])
def test_replicas_in_threads_draw_as_torch_does_and_say_so_where_they_draw(p: float, is_told: bool) -> None:
    build = functools.partial(nn.Sequential, nn.Linear(3, 3), nn.Dropout(p))
    with mw.apply_plan(build, "data_parallel,dp=2", loss_fn=_loss, optimizer=Sgd) as model:
        model.step((torch.ones(4, 3), torch.zeros(4, 3)))
        assert any("devices of one process" in reason for reason in _rng_reasons(model)) is is_told


def test_a_compiled_layer_is_left_to_torch() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    module[0].compile(backend="eager")
    with mw.apply_plan(module, "single", loss_fn=_loss, optimizer=Sgd) as model:
        model.step((torch.ones(4, 3), torch.zeros(4, 3)))
        assert any("torch.compile" in reason for reason in _rng_reasons(model))


class LooksAtGradients(nn.Module):
    """Drops where gradients are computed, as code that tells training from sampling by them does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return nn.functional.dropout(x, 0.5) if x.requires_grad else x


class SkipsByChance(nn.Module):
    """Runs a layer with a dropout that most forwards leave out, by a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.drop(x) if random.random() < 0.4 else x


@pytest.mark.parametrize("build", [LooksAtGradients, SkipsByChance])
def test_trials_find_draws_that_some_forwards_make(build: Any) -> None:
    # Both were taken for models that draw nothing.
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))

    def train(line: str) -> list[float]:
        with mw.apply_plan(build, line, loss_fn=lambda out, _: out.square().mean(), optimizer=Sgd, seed=2) as model:
            losses = [model.step((x, None)).loss for _ in range(4)]
            assert not _rng_reasons(model)
        return losses

    assert train("micro_batches=3") == pytest.approx(train("single"), rel=1e-6)


class NumpyNoise(nn.Module):
    """Adds NumPy's noise to each sample, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*x.shape).astype("float32"))
        self.seen.append(noise)
        return self.layer(x) + noise


def test_noise_of_numpy_for_each_sample_differs_in_micro_batches_and_is_told() -> None:
    # It was the same in all of them, without a word.
    with mw.apply_plan(NumpyNoise, "micro_batches=2", loss_fn=_loss, optimizer=Sgd) as model:
        model.step((torch.ones(4, 3), torch.zeros(4, 3)))
        first, second = model.module.seen[-2:]
        assert not torch.equal(first, second)
        assert any("a number for each sample" in reason for reason in _rng_reasons(model))


class Late(nn.Module):
    """Draws from its third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layer(x)
        return x + torch.rand_like(x) if self.calls > 2 else x


def test_what_draws_late_draws_as_torch_does_and_is_told() -> None:
    with mw.apply_plan(Late, "single", loss_fn=_loss, optimizer=Sgd) as model:
        batch = torch.ones(4, 3), torch.zeros(4, 3)
        assert not [reason for _ in range(2) for reason in (model.step(batch), *_rng_reasons(model))[1:]]
        model.step(batch)
        assert any("drew nothing with the first batch" in reason for reason in _rng_reasons(model))


def _noise(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.randn(*x.shape).astype("float32"))


class HiddenNoise(nn.Module):
    """Adds NumPy's noise by a function that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + _noise(x)


def test_noise_of_numpy_belongs_to_the_seed_also_in_code_that_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A library of thousands of functions: ranks that share a sample drew other noise for it, and a sentinel stopped them.
    monkeypatch.setattr(outside, "_MAX_FUNCTIONS", -1)
    losses = []
    for seed in (1, 2):
        with mw.apply_plan(HiddenNoise, "micro_batches=2", loss_fn=_loss, optimizer=Sgd, seed=0) as model:
            np.random.seed(seed)
            losses.append(model.step((torch.ones(4, 3), torch.zeros(4, 3))).loss)
    assert losses[0] == losses[1]
