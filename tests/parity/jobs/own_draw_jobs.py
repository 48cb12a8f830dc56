"""Own loops over models that draw: one forward a step, several before one step, two models in one loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from tests.parity.models.drawing_models import CASES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw

STEPS = 2
Sgd = functools.partial(torch.optim.SGD, lr=0.1)


def _share(tensor: Tensor, model: Any, sizes: Sequence[int]) -> Tensor:
    start = sum(sizes[: model.dp_rank])
    return tensor[start : start + sizes[model.dp_rank]]


def simple(case: str, line: str, sizes: Sequence[int], *, by_call: bool = True) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a loop with one forward a step."""
    build, loss_fn, batches = CASES[case]
    losses, norms = [], []
    with mw.apply_plan(build, line, loss_fn=loss_fn, optimizer=Sgd, seed=3) as model:
        for step in range(STEPS):
            model.zero_grad()
            x, y = (_share(tensor, model, sizes) for tensor in batches(step, sum(sizes)))
            loss = loss_fn(model(x), (x, y)) if by_call else model.loss((x, y))
            losses.append(model.backward(loss, weight=len(x) if by_call else None))
            norms.append(model.clip_grad_norm(1e9))
            model.optimizer.step()
        assert not [reason for reason in model.plan.reasons if reason.startswith("rng")]
    return losses, norms


class Maker(nn.Module):
    """Makes vectors of noise, with dropout, in a checkpoint of its own or without one."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 7))
        self.repeats = repeats

    def forward(self, z: Tensor) -> Tensor:
        """Return vectors [samples, 7]."""
        return checkpoint(self.layers, z, use_reentrant=False) if self.repeats else self.layers(z)


class Critic(nn.Module):
    """Judges vectors, with dropout on what it sees and inside."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(7, 12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 1))
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [samples, 1]."""
        return checkpoint(self.layers, x, use_reentrant=False) if self.repeats else self.layers(x)


def adversarial(line: str, sizes: Sequence[int], *, repeats: bool = False, plainly: bool = False) -> list[float]:
    """Return what an adversarial pair tells: losses of both, the norms of their gradients, and a sum of all parameters.

    Args:
        line: The plan of both.
        sizes: Samples of each share.
        repeats: Whether the models run in checkpoints, which backward repeats.
        plainly: Whether backward is torch's own, as one process may.
    """
    given = {"optimizer": Sgd, "seed": 5}
    maker = mw.apply_plan(lambda: Maker(repeats=repeats).double(), line, **given)
    critic = mw.apply_plan(lambda: Critic(repeats=repeats).double(), line, **given)
    softplus = nn.functional.softplus
    told: list[float] = []

    def backward(model: Any, loss: Tensor) -> None:
        if plainly:
            loss.backward()
            told.append(loss.item())
        else:
            told.append(model.backward(loss, weight=sizes[model.dp_rank]))

    for step in range(STEPS):
        source = torch.Generator().manual_seed(step)
        real = _share(torch.randn(sum(sizes), 7, generator=source, dtype=torch.float64), critic, sizes)
        noise = _share(torch.randn(sum(sizes), 4, generator=source, dtype=torch.float64), critic, sizes)
        critic.zero_grad()
        made = maker(noise)
        torch.manual_seed(0)  # whose numbers both forwards of the critic would draw again
        first = softplus(-critic(real)).mean()
        torch.manual_seed(0)
        backward(critic, first + softplus(critic(made.detach())).mean())
        told.append(critic.clip_grad_norm(1e9))
        critic.optimizer.step()
        maker.zero_grad()
        backward(maker, softplus(-critic(made)).mean())
        told.append(maker.clip_grad_norm(1e9))
        maker.optimizer.step()
    for model in (maker, critic):
        told.append(sum(float(value.sum()) for value in model.full_state_dict().values()))
        told.append(float(len([reason for reason in model.plan.reasons if reason.startswith("rng")])))
        model.close()
    return told


def accumulating(line: str, sizes: Sequence[int]) -> list[float]:
    """Return losses and norms of a loop of three forwards before each step, whose batches one process takes in the same order."""
    build, loss_fn, batches = CASES["vae"]
    told = []
    with mw.apply_plan(build, line, loss_fn=loss_fn, optimizer=Sgd, seed=3) as model:
        for step in range(STEPS):
            model.zero_grad()
            for part in range(3):
                x, y = (_share(tensor, model, sizes) for tensor in batches(10 * step + part, sum(sizes)))
                told.append(model.backward(loss_fn(model(x), (x, y)) / 3, weight=len(x)))
            told.append(model.clip_grad_norm(1e9))
            model.optimizer.step()
    return told


def joined_views(line: str, sizes: Sequence[int], *, by_view: bool) -> tuple[list[float], list[str]]:
    """Return losses and reasons of a loop over two views of each sample, joined for one call or given to a call each."""
    losses = []
    with mw.apply_plan(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3)).double(), line, optimizer=Sgd, seed=3
    ) as model:
        for step in range(STEPS):
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = _share(torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64), model, sizes)
            one, other = (model(x), model(x)) if by_view else model(torch.cat([x, x])).chunk(2)
            losses.append(model.backward((one - other).square().mean(), weight=len(x)))
            model.optimizer.step()
        return losses, [reason for reason in model.plan.reasons if reason.startswith("rng")]
