"""Models whose samples see one another, trained by plans that leave the batch whole on each dp rank; for ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.measure.plain_draws import PlainDraws
from meshwright.ranks.join import join_world

NUM_SAMPLES, STEPS = 7, 3


class Contrast(nn.Module):
    """Two towers with dropout, whose own loss compares each sample with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        scores = self.scale.exp() * left @ right.T
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)), "left": left}


class Normed(Contrast):
    """The same with norms that keep no statistics: without training, too, they normalise over a batch."""

    def __init__(self) -> None:
        super().__init__()
        for tower in (self.left, self.right):
            tower[1] = nn.Sequential(nn.BatchNorm1d(16, track_running_stats=False), nn.ReLU())


class Centred(nn.Module):
    """A norm, draws that no place decides, and an order of samples drawn among all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.norm(self.up(x)))
        if self.training:
            h = h + 0.1 * h[torch.randperm(len(h))] + 0.1 * torch.randn(12, dtype=h.dtype)
            self.mean.copy_(0.9 * self.mean + 0.1 * h.detach().mean(0))
        out = self.down(h - self.mean)
        return {"loss": (out - y[:, :3]).square().mean() + 0.1 * out.std(0).sum(), "left": out}


class Noisy(nn.Module):
    """Noise whenever it runs, in an order that the batch decides, and samples that see one another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.up(x))
        h = h + 0.3 * torch.randn_like(h)[h.sum(1).argsort()]
        out = self.down(h / (1.0 + h.var(0, unbiased=False)))
        return {"loss": (out - y[:, :3]).square().mean(), "left": out}


class Compared(nn.Module):
    """A loss of which a share alone shows nothing: of one sample, of samples without a pair, of too few for their covariance."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up = way, nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.up(x)
        if self.way == "rolled":
            loss = (h - y.roll(1, 0)[:, :4]).square().mean()
        elif self.way == "mined":
            apart = torch.arange(len(h)).remainder(2)  # the pairs that count are two samples apart
            pairs = (apart[:, None] == apart) & ~torch.eye(len(h), dtype=torch.bool)
            loss = (torch.cdist(h, h + 1e-3) * pairs).sum() / pairs.sum().clamp(min=1)
        else:
            loss = -torch.linalg.cholesky(torch.cov(h.T, correction=0)).diagonal().log().sum()
        return {"loss": loss, "left": h}


class OwnBackward(nn.Module):
    """A forward that runs backward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.up.weight.square().sum().backward()
        return self.up(x) - y[:, :3]


class Paired(nn.Module):
    """A loss of its own over all pairs of samples, and noise by sample whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left = self.left(x) + 0.1 * torch.randn(len(x), 4, dtype=x.dtype)
        return {"loss": F.cross_entropy(left @ self.right(y).T, torch.arange(len(x))), "left": left}


class Balanced(nn.Module):
    """Dropout, and a term over the batch's shares of experts while it trains alone."""

    weight = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.gate(self.up(x)).softmax(-1)
        loss = (out - y[:, :4]).square().mean()
        if self.training:
            loss = loss + self.weight * (F.one_hot(out.argmax(-1), 4).to(x.dtype).mean(0) * out.mean(0)).sum()
        return {"loss": loss, "left": out}


class Nudged(Balanced):
    """The like, whose term is so small that the loss hardly shows it."""

    weight = 1e-3


class Counted(nn.Module):
    """Noise whenever it runs, for a loss with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        del y
        out = self.up(x + 0.1 * torch.randn(len(x), 6, dtype=x.dtype))
        return {"loss": out.square().mean(), "left": out}


class Several(nn.Module):
    """Samples apart from one another, by code that takes no fewer than three."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if len(x) < 3:
            raise ValueError(f"a batch needs three samples, this has {len(x)}")
        out = self.down(torch.relu(self.up(x)))
        return {"loss": (out - y[:, :3]).square().mean(), "left": out}


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Contrast, Normed, Centred, Noisy, OwnBackward, Paired, Balanced, Nudged, Counted, Several)
}
KINDS |= {way: functools.partial(Compared, way) for way in ("rolled", "mined", "whitened")}


def build(kind: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step: int, count: int = NUM_SAMPLES) -> dict[str, Tensor]:
    """Return the global batch of a step."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(count, 6, generator=made, dtype=torch.float64)
    return {"x": x, "y": x + torch.randn(count, 6, generator=made, dtype=torch.float64)}


sgd = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def own_loss(outputs: Any, given: Any) -> Tensor:
    """Return the model's own loss, by a function of the user's."""
    del given
    return outputs["loss"]


def squares(outputs: Any, given: Any) -> Tensor:
    """Return the mean of squares."""
    del given
    return outputs.square().mean()


def as_sum(outputs: Any, given: Any) -> mw.Loss:
    """Return the loss as a sum with its weight."""
    return mw.Loss(outputs["loss"] * len(given["x"]), len(given["x"]))


LOSSES = {"own": None, "own_loss": own_loss, "as_sum": as_sum, "squares": squares}


def plainly(
    kind: str, change: str = "", steps: int = STEPS, count: int = NUM_SAMPLES
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return losses, gradients of each step and the state after a plain loop, of a model that was changed before."""
    module, losses, gradients = build(kind), [], []
    if change:
        alter(module, change)
    optimizer, draws = sgd(module.parameters()), PlainDraws(0, None)
    for step in range(steps):
        with draws(step, module, batch(step, count)):
            loss = module(**batch(step, count))["loss"]
            loss.backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, module.state_dict()


def train(kind: str, line: str, loss: str = "own", loop: str = "step", folder: str | None = None) -> dict[str, Any]:
    """Train under a plan, by `model.step`, by an own loop, or going on from another plan's checkpoint."""
    model = mw.apply_plan(functools.partial(build, kind), line, loss_fn=LOSSES[loss], optimizer=sgd)
    found: dict[str, Any] = {"losses": [], "gradients": [], "samples": [], "place": (model.dp_rank, model.dp_size)}
    first = 0
    if folder is not None and Path(folder).exists():
        first = mw.load_checkpoint(model, folder)
    for step in range(first, STEPS):
        given = mw.split_batch(batch(step), model)
        if loop == "step":
            result = model.step(given)
            found["losses"].append(result.loss)
            found["samples"].append(result.num_samples)
            found["gradients"].append(model.full_gradients())
        else:
            value = model.loss(given) if loop == "loss" else model(**given)["loss"]
            found["losses"].append(model.backward(value))
            found["gradients"].append(model.full_gradients())
            model.optimizer.step()
            model.zero_grad()
        if folder is not None and step == 0:
            mw.save_checkpoint(model, folder, step=1)
            break
    found["evaluated"] = model.evaluate(mw.split_batch(batch(9), model))
    found["state"], found["reasons"] = model.full_state_dict(), model.plan.reasons
    model.close()
    return found


def gathered(line: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a loss over gathered rows, of which each rank has all already."""
    model = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd, rng="torch")
    model.eval()
    left = mw.gather_batch(model(**mw.split_batch(batch(0), model))["left"], model)
    loss = model.backward((left @ left.T).square().mean())
    return loss, model.full_gradients()


def apart(line: str) -> None:
    """Step on batches that differ between the ranks."""
    rank = join_world().rank
    model = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd)
    model.step(batch(rank))


def beside(line: str) -> tuple[float, float]:
    """Run backward through a parameter that is in no model under a plan; return loss and its gradient."""
    model = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd)
    other = nn.Parameter(torch.ones((), dtype=torch.float64))
    model.eval()
    loss = model.backward(model(**batch(0))["loss"] * other)
    assert other.grad is not None
    return loss, other.grad.item()


def meeting(line: str, other: str) -> float:
    """Run backward on a loss of two models that share out their batches differently."""
    first = mw.apply_plan(functools.partial(build, "Contrast"), line, optimizer=sgd)
    second = mw.apply_plan(functools.partial(build, "Contrast"), other, optimizer=sgd)
    return first.backward(first(**batch(0))["loss"] + second(**batch(0))["loss"], weight=NUM_SAMPLES)


def alter(module: nn.Module, change: str) -> None:
    """Freeze a parameter of a model, or replace one of its layers."""
    if change == "frozen":
        module.get_parameter("left.0.weight").requires_grad_(False)
    else:
        module.get_submodule("left").add_module("1", nn.Tanh())
