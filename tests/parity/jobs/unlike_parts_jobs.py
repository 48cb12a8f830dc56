"""Models whose parts have modes, functions or proofs of their own, for ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

NUM_STEPS, NUM_SAMPLES, SIZE = 2, 7, 6


class Frozen(nn.Module):
    """A body that the model's own `train` keeps in eval mode; nobody has called it before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.tanh(self.first(x))))


class _Simplex(torch.autograd.Function):
    """A softmax whose backward needs its result, as sparsemax and the like do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = torch.softmax(x, -1)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return found * (slope - (slope * found).sum(-1, keepdim=True))


class Chosen(nn.Module):
    """Code between layers that calls a function which saves its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.chosen, self.head = nn.Linear(SIZE, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x * _Simplex.apply(self.chosen(x)))


class Nodes(nn.Module):
    """A part whose calls are proven by their sizes, so that ranks of a larger share prove while the others compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)) for size in (SIZE, 8)
        )
        self.heads = nn.ModuleList(nn.Linear(size, 3) for size in (SIZE, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (1, SIZE)).expand(-1, 4, -1)
        found = [x]
        for part, scale in zip(self.parts, self.scales, strict=True):
            found.append(torch.relu(part(x.sum(1, keepdim=True) + (1 + scale) * x)))
            x = found[-1]
        heads = [head(each.sum(1)) for head, each in zip(self.heads, found, strict=True)]
        return torch.stack([F.dropout(each, 0.1, self.training) for each in heads]).sum(0)


class _Cell(nn.Module):
    """A cell that reads its parameters in a dict of its own, as liquid time-constant networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weight": nn.Parameter(torch.randn(8, 8) * 0.3), "deep": [nn.Parameter(torch.ones(8))]}
        self.register_parameter("weight", self.held["weight"])
        self.register_parameter("scale", self.held["deep"][0])

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(x + state @ self.held["weight"]) * self.held["deep"][0]


class Recurrent(nn.Module):
    """A recurrence that runs its cell by `cell.forward`, which calls no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(SIZE, 8), _Cell(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = state = F.dropout(self.first(x), 0.1, self.training)
        for _ in range(3):
            state = self.cell.forward(x, state)
        return self.head(state)


class Held(nn.Module):
    """Layers that read their parameters in a list, in a tuple and in a dict of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(SIZE, 8), nn.ModuleList(map(_Holder, range(3))), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class _Holder(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.ones(8))
        pair = self.weight, self.bias
        self.held: Any = [[*pair], pair, {"pair": [pair]}][kind]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held["pair"][0] if isinstance(self.held, dict) else self.held
        return F.linear(x, weight, bias)


class Likely(nn.Module):
    """A model whose forward makes a distribution of its last layer's results, as a variational autoencoder's decoder does."""

    is_checked: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(SIZE, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).chunk(2, -1)
        return torch.distributions.Normal(mean, self.scale(spread), self.is_checked).log_prob(x[:, :3])

    def scale(self, spread: Tensor) -> Tensor:
        return F.softplus(spread)


class Checked(Likely):
    is_checked = True


class Invalid(Checked):
    """Its scales are below 0. It asks for checks: torch.compile turns those off that nobody has asked for."""

    def scale(self, spread: Tensor) -> Tensor:
        return -F.softplus(spread)


class Correlated(Likely):
    """Numbers that vary together: whether their covariances are symmetric is looked at before they are factorized."""

    def forward(self, x: Tensor) -> Tensor:
        root = self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).unflatten(-1, (2, 3))
        covariances = root @ root.mT + torch.eye(2, dtype=x.dtype)
        chances = torch.distributions.MultivariateNormal(root[..., 0], covariances).log_prob(x[:, :2])
        return root.sum(1) * chances[:, None]


class Verified(Likely):
    """A check of a late layer's results by the function that transformers' models call."""

    def scale(self, spread: Tensor) -> Tensor:
        torch._check_tensor_all(spread.isfinite(), lambda: "a spread is not finite")
        return F.softplus(spread)


class Unverified(Likely):
    """The like, which the results do not pass."""

    def scale(self, spread: Tensor) -> Tensor:
        torch._check_tensor_all(spread > 1e9, lambda: "to satisfy the constraint of the model")
        return spread


class Asserted(Likely):
    """An assertion by torch's function, which traced models of images use."""

    def scale(self, spread: Tensor) -> Tensor:
        torch._assert(spread.isfinite().all(), "a spread is not finite")
        return F.softplus(spread)


class Refuted(Likely):
    """The like, which the results do not pass."""

    def scale(self, spread: Tensor) -> Tensor:
        torch._assert((spread > 1e9).all(), "to satisfy the constraint of the model")
        return spread


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": Frozen,
    "chosen": Chosen,
    "nodes": Nodes,
    "recurrent": Recurrent,
    "held": Held,
    "likely": Likely,
    "checked": Checked,
    "correlated": Correlated,
    "invalid": Invalid,
    "verified": Verified,
    "unverified": Unverified,
    "asserted": Asserted,
    "refuted": Refuted,
}


def build(name: str) -> nn.Module:
    return MODELS[name]().double()


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(NUM_SAMPLES, SIZE, generator=generator, dtype=torch.float64),
            torch.randint(3, (NUM_SAMPLES,), generator=generator),
        )
        for _ in range(NUM_STEPS)
    ]


def train(name: str, line: str) -> tuple[list[float], dict[str, Tensor], tuple[str, ...]]:
    """Return the losses, the parameters and the plan's reasons."""
    model = mw.apply_plan(
        functools.partial(build, name), line, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches()]
    state, reasons = model.full_state_dict(), tuple(model.plan.reasons)
    model.close()
    return losses, state, reasons


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same in plain PyTorch, for models that draw nothing."""
    torch.manual_seed(0)
    model, losses = build(name), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        loss = loss_fn(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()
