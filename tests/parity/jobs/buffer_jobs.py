"""A model that counts its calls in a buffer, and scripts that run it on some ranks alone; ranks import them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parity.jobs.textbook_loop import steps_of
from torch import Tensor, nn

import meshwright as mw


class Counting(nn.Module):
    """A layer whose outputs depend on how often it ran."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x) / (1.0 + 0.1 * self.seen)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Counting(), nn.Tanh(), nn.Linear(6, 4)).double()


def batch(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(num_samples, size, generator=generator, dtype=torch.float64) for size in (6, 4))
    return inputs, targets


def square(outputs: Tensor, pair: Any) -> Tensor:
    return (outputs - pair[1]).square().mean()


def train(plan: str, *, by_hand: tuple[int, ...] = (), shares_memory: bool = True) -> tuple[list[float], int]:
    """Return losses, and how often the model ran by its buffer.

    Evaluations have one sample, so that a rank has none; the ranks of `by_hand` call the model once between two steps.
    """
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=sgd, sentinel_every=0) as model:
        group = model.engine.everyone
        before, group.shares_memory = group.shares_memory, group.shares_memory and shares_memory
        try:
            losses = []
            for step in range(3):
                losses.append(model.evaluate(mw.split_batch(batch(1, step), model))["loss"])
                if model.world.rank in by_hand:
                    model(batch(2, step)[0])
                losses.append(model.step(mw.split_batch(batch(4, 10 + step), model)).loss)
        finally:
            group.shares_memory = before
        return losses, int(model.full_state_dict()["1.seen"])


def plain(*, calls: int = 0) -> tuple[list[float], int]:
    """Return the same of one device, where `calls` calls come between an evaluation and a step."""
    torch.manual_seed(0)
    module = build()
    losses, steps = [], steps_of(module, [batch(4, 10 + step) for step in range(3)], square)
    for step in range(3):
        pair = batch(1, step)
        losses.append(square(module(pair[0]), pair).item())
        for _ in range(calls):
            module(batch(2, step)[0])
        losses.append(next(steps))
    return losses, int(module.state_dict()["1.seen"])


class NormedImages(nn.Module):
    """Convolutions with statistics; images of one size take another branch, which is not proven on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(10, 10, 3, padding=1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(10, 10, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(10)),
            ]
        )
        self.head = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if x.shape[2] > 4:
            x = x * (torch.arange(x.shape[1], dtype=x.dtype) + 1)[None, :, None, None]
        return self.head(x.mean((2, 3)))


def statistics(plan: str) -> dict[str, Tensor]:
    """Return the buffers after four steps with images of two sizes."""
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model = mw.apply_plan(
        lambda: NormedImages().double(), plan, loss_fn=_image_loss, optimizer=optimizer, seed=0, sentinel_every=2
    )
    generator = torch.Generator().manual_seed(1)
    for size in (4, 6, 4, 6):
        images = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
        batch = images, torch.randint(0, 7, (2,), generator=generator)
        model.step(mw.split_batch(batch, model))
    return {name: value for name, value in model.full_state_dict().items() if "running" in name}


def _image_loss(outputs: Tensor, pair: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, pair[1])


class Centred(nn.Module):
    """Follows the mean of its inputs, as DINO's centre does."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.centre
        if self.training:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return result


class LateCentred(Centred):
    """The same from the fifth call on; the count of calls is a buffer of its own from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) if self.calls > 4 else x


class Uncounted(Centred):
    """Writes past torch's count of writes, as codes of quantised models do."""

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.centre
        if self.training:
            self.centre.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return result


class Spectral(nn.Module):
    """Takes a step of the power iteration in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


KINDS = {
    "uncounted": Uncounted,
    "spectral": Spectral,
    "centre": Centred,
    "norm": functools.partial(nn.BatchNorm1d, 6),
    "count": Counting,
}


def late_reasons(plan: str) -> list[str]:
    return reasons_of(LateCentred, plan, num_steps=6)


def reasons_of(kind: Any, plan: str, *, num_steps: int = 2) -> list[str]:
    """Return the plan's reasons about buffers after some steps with such a layer."""
    torch.manual_seed(0)
    made = KINDS[kind]() if isinstance(kind, str) else kind()
    module = nn.Sequential(nn.Linear(6, 6), made, nn.Linear(6, 4)).double()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(module, plan, loss_fn=_mean, optimizer=sgd) as model:
        for step in range(num_steps):
            model.step(mw.split_batch(batch(4, step), model))
        return [reason for reason in model.plan.reasons if reason.startswith("buffers:")]


def centre_after(plan: str) -> Tensor:
    """Return this rank's own buffer after five steps with a layer whose writes torch does not count."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), Uncounted(), nn.Linear(6, 4)).double()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(module, plan, loss_fn=_mean, optimizer=sgd, sentinel_every=0) as model:
        for step in range(5):
            model.step(mw.split_batch(batch(4, step), model))
        return model.module[1].centre.clone()


def _mean(outputs: Tensor, pair: Any) -> mw.Loss:
    return mw.Loss((outputs - pair[1]).square().sum(), len(outputs))


class OtherName(nn.Module):
    """Keeps numbers of its first layer's outputs, between the layers, in tensors that it names otherwise while it writes."""

    whole: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("whole", torch.zeros(6))
        self.register_buffer("rows", torch.zeros(2, 6))
        self.attribute = torch.zeros(2, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.attribute[0]
        mean = x.detach().mean(0)
        self.whole.data.mul_(0.9).add_(mean)
        self.rows[1].copy_(mean)
        self.attribute[0].copy_(mean)
        return self.last(x)


def train_under_another_name(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the state of four steps, as this rank has them."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(lambda: OtherName().double(), plan, loss_fn=_mean, optimizer=sgd) as model:
        losses = [model.step(mw.split_batch(batch(4, step), model)).loss for step in range(4)]
        return losses, model.full_state_dict()
