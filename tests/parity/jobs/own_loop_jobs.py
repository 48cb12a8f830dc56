"""Own loops: scripts that run alike on one plain process and under a plan, with other data on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

STEPS = 3
Sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """A product, an activation and a product, which tensor parallelism cuts."""

    def __init__(self, num_in: int, num_hidden: int, num_out: int, *, normed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(num_in, num_hidden)
        self.norm = nn.LayerNorm(num_in) if normed else nn.Identity()
        self.down = nn.Linear(num_hidden, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def build_net() -> nn.Module:
    return nn.Sequential(Block(7, 12, 6, normed=True), Block(6, 12, 5)).double()


def build_generator() -> nn.Module:
    return nn.Sequential(Block(4, 12, 6), Block(6, 12, 7)).double()


def build_critic() -> nn.Module:
    return Block(7, 12, 1, normed=True).double()


class Plain:
    """One plain process with the calls of a model under a plan."""

    def __init__(self, build: Callable[[], nn.Module], loss_fn: Any = None, optimizer: Any = Sgd) -> None:
        torch.manual_seed(0)
        self.module = build()
        self.optimizer = optimizer(self.module.parameters())
        self.loss_fn = loss_fn

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def loss(self, batch: Any) -> Tensor:
        return self.loss_fn(self.module(batch[0]), batch)

    def backward(self, loss: Any, *, weight: float | None = None) -> float:
        del weight
        value = loss.sum / loss.weight if isinstance(loss, mw.Loss) else loss
        value.backward()
        return value.item()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> float:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm).item()

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.module.named_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()


Share = Callable[[Tensor], Tensor]
Found = dict[str, Any]


def numbers(seed: int, *shape: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.arange(1, shape[0] + 1, dtype=torch.float64).reshape(-1, 1)  # samples of different sizes


def batch_of(seed: int, num_samples: int = 7) -> tuple[Tensor, Tensor]:
    return numbers(seed, num_samples, 7), numbers(seed + 100, num_samples, 5)


def square(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def seen_by(model: Any) -> dict[str, Tensor]:
    return {name: g.detach().clone() for name, g in model.full_gradients().items() if g is not None}


def plain_loop(make: Any, share: Share) -> Found:
    model, told = make(build_net), []
    for step in range(STEPS):
        x, y = map(share, batch_of(step))
        model.optimizer.zero_grad()
        told.append(model.backward((model(x) - y).square().mean(), weight=len(x)))
        gradients = seen_by(model)
        model.optimizer.step()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def given_loss(make: Any, share: Share) -> Found:
    model, told = make(build_net, square), []
    for step in range(STEPS):
        model.zero_grad()
        told.append(model.backward(model.loss(tuple(map(share, batch_of(step))))))
        gradients = seen_by(model)
        model.optimizer.step()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def accumulation(make: Any, share: Share) -> Found:
    """Three backwards before a step: a mean, a sum with its weight, and one loss of two forwards."""
    model, told = make(build_net), []
    for step in range(STEPS):
        batches = [tuple(map(share, batch_of(10 * step + index))) for index in range(4)]
        errors = [(model(x) - y).square() for x, y in batches]
        told.append(model.backward(errors[0].mean() / 3, weight=len(errors[0])))
        told.append(model.backward(mw.Loss(errors[1].sum(), errors[1].numel())))
        told.append(model.backward(errors[2].mean() + 0.5 * errors[3].mean(), weight=len(errors[2])))
        gradients = seen_by(model)
        model.optimizer.step()
        model.zero_grad()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def clipping(make: Any, share: Share) -> Found:
    model, told = make(build_net), []
    for step in range(STEPS):
        x, y = map(share, batch_of(step))
        model.zero_grad()
        model.backward((model(x) - y).square().mean(), weight=len(x))
        told.append(model.clip_grad_norm(0.3))
        gradients = seen_by(model)
        model.optimizer.step()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def adversarial(make: Any, share: Share) -> Found:
    """Two models and two optimizers; what the generator gave is used in both losses."""
    maker, critic, told = make(build_generator), make(build_critic), []
    softplus = nn.functional.softplus
    for step in range(STEPS):
        real, noise = share(batch_of(step)[0]), share(numbers(200 + step, 7, 4))
        critic.zero_grad()
        fake = maker(noise)
        loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        told.append(critic.backward(loss, weight=len(real)))
        critic.optimizer.step()
        maker.zero_grad()
        told.append(maker.backward(softplus(-critic(fake)).mean(), weight=len(real)))
        gradients = seen_by(maker) | {f"critic.{name}": g for name, g in seen_by(critic).items()}
        maker.optimizer.step()
    state = maker.full_state_dict() | {f"critic.{name}": v for name, v in critic.full_state_dict().items()}
    return {"told": told, "gradients": gradients, "state": state}


SCRIPTS = {
    "plain": plain_loop,
    "given_loss": given_loss,
    "accumulation": accumulation,
    "clipping": clipping,
    "adversarial": adversarial,
}


def find(script: str) -> Callable[[Any, Share], Found]:
    return (SCRIPTS | OTHER_SCRIPTS)[script]


def alone(script: str) -> Found:
    return find(script)(Plain, lambda tensor: tensor)


def under_plan(script: str, plan: str, sizes: Sequence[int]) -> Found:
    """Run a script under a plan; the ranks' shares have these sizes."""
    models: list[mw.ParallelModel] = []

    def make(build: Any, loss_fn: Any = None) -> mw.ParallelModel:
        models.append(mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=Sgd))
        return models[-1]

    def share(tensor: Tensor) -> Tensor:
        return tensor.split(list(sizes))[models[0].dp_rank]

    try:
        return find(script)(make, share)
    finally:
        for model in models:
            model.close()


# -- torch's own functions between backward and the optimizer --------------------------------------------------------


def by_torch(make: Any, share: Share) -> Found:
    """A hook that scales, clipping by torch, and a parameter that is frozen and switched on again."""
    model, told = make(build_net), []
    first, last = model.module[0].up.weight, model.module[1].down.bias
    first.register_hook(lambda gradient: 2 * gradient)
    for step in range(STEPS):
        last.requires_grad_(step != 1)
        x, y = map(share, batch_of(step))
        model.optimizer.zero_grad()
        told.append(model.backward((model(x) - y).square().mean(), weight=len(x)))
        told.append(nn.utils.clip_grad_norm_(model.module.parameters(), 0.5).item())
        gradients = seen_by(model)
        model.optimizer.step()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


class Towers(nn.Module):
    """Features of pairs, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Block(7, 12, 6), Block(5, 12, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * self.image(x), self.text(y)


def build_towers() -> nn.Module:
    return Towers().double()


def contrastive(make: Any, share: Share) -> Found:
    """Losses over the global batch: of all features on each rank, and of this rank's rows beside all features."""
    model, told = make(build_towers), []

    def gathered(tensor: Tensor) -> Tensor:
        return tensor if isinstance(model, Plain) else mw.gather_batch(tensor, model)

    for step in range(STEPS):
        x, y = map(share, batch_of(step))
        model.zero_grad()
        images, texts = model(x, y)
        logits = gathered(images) @ gathered(texts).T
        told.append(model.backward(nn.functional.cross_entropy(logits, torch.arange(7)), weight=len(x)))
        images, texts = model(x, y)
        rows = images @ gathered(texts).T
        own = share(torch.arange(7, dtype=torch.float64).reshape(-1, 1)).long().flatten()
        told.append(model.backward(nn.functional.cross_entropy(rows, own), weight=len(x)))
        gradients = seen_by(model)
        model.optimizer.step()
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def rewarded(make: Any, share: Share) -> Found:
    """A policy's gradient by rewards that are normalised over the global batch."""
    model, told = make(build_net), []
    for step in range(STEPS):
        x, y = map(share, batch_of(step))
        model.zero_grad()
        scores = model(x).log_softmax(-1)[:, 0]
        rewards = y.sum(-1)
        every = rewards if isinstance(model, Plain) else mw.gather_batch(rewards, model)
        rewards = (rewards - every.mean()) / every.std()
        told.append(model.backward(-(scores * rewards).mean(), weight=len(x)))
        gradients = seen_by(model)
        model.optimizer.step()
    assert isinstance(model, Plain) or any("mw.gather_batch" in reason for reason in model.plan.reasons)
    return {"told": told, "gradients": gradients, "state": model.full_state_dict()}


def frozen_critic(make: Any, share: Share) -> Found:
    """A model that trains nothing of its own in one of two terms; gradients pass through it."""
    maker, critic, told = make(build_generator), make(build_critic), []
    for parameter in critic.module.parameters():
        parameter.requires_grad_(False)
    for step in range(STEPS):
        noise = share(numbers(200 + step, 7, 4))
        maker.zero_grad()
        fake = maker(noise)
        told.append(maker.backward(fake.abs().mean() + critic(fake).square().mean(), weight=len(noise)))
        gradients = seen_by(maker)
        maker.optimizer.step()
    return {"told": told, "gradients": gradients, "state": maker.full_state_dict()}


OTHER_SCRIPTS = {"by_torch": by_torch, "contrastive": contrastive, "frozen_critic": frozen_critic, "rewarded": rewarded}
