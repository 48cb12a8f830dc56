"""Training of models with BatchNorm whose ranks normalise over all samples of a batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw


class Images(nn.Module):
    """Norms of images and of features: with a momentum, cumulative ones, without parameters, and without statistics."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.cumulative = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.up, self.bare = nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False)
        self.stateless, self.drop = nn.BatchNorm1d(16, track_running_stats=False), nn.Dropout(rate)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.cumulative(self.second(x))).mean((2, 3))
        return self.head(self.drop(self.stateless(torch.relu(self.bare(self.up(x))))))


class Inside(nn.Module):
    """A norm between two convolutions that tensor parallelism cuts together."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(6, 32, 1), nn.BatchNorm1d(32), nn.Conv1d(32, 6, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).repeat(1, 2, 1)
        return self.head((x + self.down(torch.relu(self.norm(self.up(x))))).mean(2))


class Teacher(nn.Module):
    """The same norms twice, once without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(108, 8)
        self.own, self.fixed = _head(), _head()
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x.flatten(1))
        with torch.no_grad():
            target = self.fixed(x)
        return self.own(x) + target


def _head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


class _Acting(nn.BatchNorm2d):
    """A layer whose class computes more than the norm, as timm's do, and calls the function by itself."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        rate = 0.2 if self.training else 0.0
        statistics = self.running_mean, self.running_var
        return scale * torch.tanh(F.batch_norm(x, *statistics, self.weight, self.bias, self.training, rate, self.eps))


class _Around(nn.BatchNorm1d):
    """A layer whose class calls torch's forward between other things."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x.flatten(1) + 1))


class Acting(nn.Module):
    """Norms of classes with forwards of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), _Acting(8), _Around(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(F.adaptive_avg_pool2d(self.norm(self.first(x), scale=2.0), 2)))


class Chunks(nn.Module):
    """A norm of each half of what it gets: which samples are in a half depends on the share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(108, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(part) for part in self.up(x.flatten(1)).chunk(2)]))


class _ByHand(nn.BatchNorm1d):
    """A layer that takes its statistics without torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


class ByHand(nn.Module):
    """A norm that exchanges nothing; in eval mode where it is frozen."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(108, 8), _ByHand(8), nn.Linear(8, 4)
        self._is_frozen = is_frozen

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(self.training and not self._is_frozen)
        return self.head(self.norm(self.up(x.flatten(1))))


class Repeated(Images):
    """A norm inside of what backward computes again."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self._is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        norm = functools.partial(checkpoint, lambda y: torch.relu(self.norm(y)), use_reentrant=self._is_reentrant)
        x = torch.relu(self.cumulative(self.second(norm(self.first(x))))).mean((2, 3))
        return self.head(self.up(x))


MODELS: dict[str, Any] = {
    "images": Images,
    "dropping": functools.partial(Images, 0.3),
    "inside": Inside,
    "teacher": Teacher,
    "acting": Acting,
    "chunks": Chunks,
    "by hand": functools.partial(ByHand, is_frozen=False),
    "by hand, frozen": functools.partial(ByHand, is_frozen=True),
    "repeated": functools.partial(Repeated, is_reentrant=False),
    "repeated, reentrant": functools.partial(Repeated, is_reentrant=True),
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def _loss(outputs: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, pair[1])


def _batch(step: int, count: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 4, (count,), generator=generator)


def plainly(name: str, count: int = 7) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state of three steps in plain torch."""
    model = _build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = _loss(model(_batch(step, count)[0]), _batch(step, count))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(
    name: str, line: str, *, is_synced: bool = True, count: int = 7
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Return losses, state and reasons of three steps under a plan, with shares of unequal size."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build = functools.partial(_build, name)
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=is_synced) as model:
        losses = [model.step(mw.split_batch(_batch(step, count), model)).loss for step in range(3)]
        return losses, model.full_state_dict(), list(model.plan.reasons)


def evaluated(line: str) -> float:
    """Return the loss of a batch of one sample after a step, which some ranks have no share of."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build = functools.partial(_build, "inside")
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=True) as model:
        model.step(mw.split_batch(_batch(0), model))
        return model.evaluate(mw.split_batch(_batch(1, 2), model))["loss"]


def whole_after_training(line: str) -> tuple[bool, Tensor]:
    """Return whether a copy of a trained layer is torch's own to others, and the means of what it gives by itself."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build = functools.partial(_build, "images")
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=True) as model:
        model.step(mw.split_batch(_batch(0), model))
        norm = copy.deepcopy(model.module.norm)
        share = torch.arange(32.0, dtype=torch.float64).view(2, 8, 2) ** 0.5
        is_users = isinstance(norm, nn.BatchNorm2d) and type(norm) == nn.BatchNorm2d  # noqa: E721
        return is_users, norm(share[..., None]).mean((0, 2, 3)) - norm.bias


def not_finite(line: str, what: str) -> tuple[bool, float]:
    """Return whether a step was left out whose only sample on rank 1 is not a number, and the loss of the next one."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build = functools.partial(_build, "acting")
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=True, non_finite=what) as model:
        images, labels = _batch(0, 3)
        images[2] = torch.nan
        skipped = model.step(mw.split_batch((images, labels), model)).skipped
        return skipped, model.step(mw.split_batch(_batch(1, 3), model)).loss


def _with_own_forward() -> nn.Module:
    model = _build("images")
    norm = model.norm
    model.norm.forward = lambda x: F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
    return model


def with_own_forward(line: str) -> None:
    """Apply a plan to a model one of whose norms has a forward of its own on the object."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    mw.apply_plan(_with_own_forward, line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=True).close()


def train_converted(line: str) -> None:
    """Train a model whose norms torch has made into its own synced ones, as scripts around DDP do."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build = nn.SyncBatchNorm.convert_sync_batchnorm(_build("images"))
    with mw.apply_plan(build, line, loss_fn=_loss, optimizer=sgd) as model:
        model.step(mw.split_batch(_batch(0), model))


def stopped(what: str, line: str) -> None:
    """Train a step; rank 1 cannot take the second one, or its code raises in it, behind a norm or in the loss."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(lambda: _build("images"), line, loss_fn=_loss, optimizer=sgd, sync_batch_norm=True) as model:
        model.step(mw.split_batch(_batch(0), model))
        images, labels = mw.split_batch(_batch(1), model)
        if mw.current_world().rank == 1:
            if what == "no samples":
                images, labels = images[:0], labels[:0]
            elif what == "forward":
                model.module.norm.register_forward_hook(_raise)
            elif what == "loss":
                labels = labels + 100
        model.step((images, labels))


def _raise(*_: Any) -> None:
    raise ValueError("of the user's code")
