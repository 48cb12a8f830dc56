"""Models that draw by Python's and NumPy's generators for one sample after the other, in their own code."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw

STEPS = 3
NUM_SAMPLES = 7
LENGTH = 5
SEED = 20
"""With which the first trial of `LayerDrop` leaves out two of its layers."""


def _masks(num: int, length: int, rate: float, *, by_numpy: bool) -> Tensor:
    """Return masks as SpecAugment makes them: one number for all, then a choice for each sample."""
    more = np.random.rand(1).item() if by_numpy else random.random()
    masked = np.zeros((num, length), dtype=bool)
    for row in masked:
        count = int(rate * length + more)
        row[np.random.choice(length, count, replace=False) if by_numpy else random.sample(range(length), count)] = True
    return torch.from_numpy(masked)


class Masked(nn.Module):
    """Masks over the steps, then over the features, and dropout where it is asked for."""

    def __init__(self, *, by_numpy: bool = True, rate: float = 0.0) -> None:
        super().__init__()
        self.by_numpy = by_numpy
        self.mask = nn.Parameter(torch.randn(6))
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(rate)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            x = torch.where(_masks(len(x), LENGTH, 0.4, by_numpy=self.by_numpy)[..., None], self.mask, x)
            x = x.masked_fill(_masks(len(x), 6, 0.2, by_numpy=self.by_numpy)[:, None], 0)
        return self.down(self.dropout(torch.relu(self.up(x)))).mean(1) - y


class Inner(nn.Module):
    """Two factors for each sample, of which all samples take the first ones before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for shift in range(2):
            factors = [random.uniform(0.5, 1.5) for _ in range(len(x))]
            x = x * torch.tensor(factors, dtype=x.dtype)[:, None, None] + shift
        return self.down(torch.relu(self.up(x))).mean(1) - y


class Uneven(Inner):
    """As many numbers for a sample as its values say."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        counts = [int(row.abs().sum()) % 3 for row in x]
        factors = [1 + sum(np.random.uniform(-0.1, 0.1) for _ in range(count)) for count in counts]
        return self.down(torch.relu(self.up(x * torch.tensor(factors, dtype=x.dtype)[:, None, None]))).mean(1) - y


class Later(Masked):
    """Draws once more for each sample, from the second step on."""

    is_late = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.is_late and self.training:
            y = y + torch.tensor([[random.uniform(-1, 1)] for _ in range(len(y))], dtype=y.dtype)
        return super().forward(x, y)


class Doubled(Inner):
    """Samples of which some are doubled: in the trials, with `SEED`, none is."""

    def _factors(self, num: int) -> list[float]:
        return [2.0 if random.random() > 0.6 else 1.0 for _ in range(num)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factors = torch.tensor(self._factors(len(x)) if self.training else [1.0] * len(x), dtype=x.dtype)
        return self.down(torch.relu(self.up(x * factors[:, None, None]))).mean(1) - y


class DoubledTogether(Doubled):
    """The same by one call for all samples."""

    def _factors(self, num: int) -> list[float]:
        return np.where(np.random.rand(num) < 0.05, 2.0, 1.0).tolist()


class Branches(Doubled):
    """One number for all samples decides whether each is scaled: in the trials, with `SEED`, none is."""

    def _factors(self, num: int) -> list[float]:
        return self._of_samples(num) if random.random() < 0.3 else [1.0] * num

    def _of_samples(self, num: int) -> list[float]:
        return [random.uniform(0.5, 1.5) for _ in range(num)]


class BranchesTogether(Branches):
    """The same by one call for all samples."""

    def _of_samples(self, num: int) -> list[float]:
        return np.random.rand(num).tolist()


class BranchesForAll(Branches):
    """One number more, by which all samples are scaled."""

    def _of_samples(self, num: int) -> list[float]:
        return [random.uniform(0.5, 1.5)] * num


class _Pair(nn.Module):
    """Two linear layers of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)


class _Dropped(_Pair):
    """A residual layer with dropout, which a number skips as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class LayerDrop(nn.Module):
    """Four layers, of which each is left out in three of ten forwards."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.rate = rate
        self.layers, self.head = nn.ModuleList(_Dropped() for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) >= self.rate:
                x = layer(x)
        return self.head(x).mean(1) - y


class _Scaled(_Pair):
    """A layer that scales each sample by a number of its own, in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        factors = [random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5) for _ in range(len(x))]
        return x + self.down(torch.tanh(self.up(x)) * torch.tensor(factors, dtype=x.dtype)[:, None, None])


class Layered(nn.Module):
    """Four such layers, of which stages run some, and backward may repeat each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Scaled() for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1) - y


class _Changed(Inner):
    """Changes its inputs in training."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.change(x) if self.training else x))).mean(1) - y

    def change(self, x: Tensor) -> Tensor:
        """Return other inputs."""
        return x * _column([random.uniform(0.5, 1.5) for _ in range(len(x))], x)


def _column(values: list[float], x: Tensor) -> Tensor:
    return torch.tensor(values, dtype=x.dtype)[:, None, None]


class SeededByCode(_Changed):
    """Puts the features in an order that a seed of its own gives, for all steps alike, beside a factor for each sample."""

    orders: list[list[int]]

    def change(self, x: Tensor) -> Tensor:
        before = np.random.get_state()
        random.seed(5)
        np.random.seed(5)
        order, signs = random.sample(range(6), 6), np.random.choice([-1.0, 1.0], 6)
        np.random.set_state(before)
        self.orders = [*getattr(self, "orders", []), order]
        factors = [np.random.uniform(0.5, 1.5) for _ in range(len(x))]
        return x[..., order] * torch.from_numpy(signs) * _column(factors, x)


class Repeated(_Changed):
    """A checkpoint in the model's own code around draws for each sample."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(checkpoint(self._inner, x, use_reentrant=False)).mean(1) - y

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) * _column([random.uniform(0.5, 1.5) for _ in range(len(x))], x)


class Rare(_Changed):
    """Three loops over samples of one place in the code, whose numbers hardly ever change anything."""

    def change(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x * _column([2.0 if random.random() < 0.0001 else 1.0 for _ in range(len(x))], x)
        return x


class Chosen(_Changed):
    """Changes the samples that chance has chosen, by another number each."""

    def change(self, x: Tensor) -> Tensor:
        return x * _column([random.uniform(0.5, 1.5) if random.random() < 0.3 else 1.0 for _ in x], x)


class Shorter(_Changed):
    """Draws for each step of the longest sample; each sample takes the numbers of its own steps."""

    def change(self, x: Tensor) -> Tensor:
        lengths = x[:, 0, 0].abs().mul(4).long() + 1
        for step in range(int(lengths.max())):
            x = torch.where((step < lengths)[:, None, None], x * random.uniform(0.5, 1.5), x)
        return x


class Mixed(_Changed):
    """Mixes the samples in one forward of fifty."""

    def change(self, x: Tensor) -> Tensor:
        return 0.5 * (x + x[np.random.permutation(len(x))]) if random.random() < 0.02 else x


class Begun(_Changed):
    """Draws from the third step on."""

    is_late = False

    def change(self, x: Tensor) -> Tensor:
        return super().change(x) if self.is_late else x


class Steps(_Changed):
    """A number for each step of the sequence, of which later batches have fewer."""

    def change(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, step] * random.uniform(0.5, 1.5) for step in range(x.shape[1])], 1)


class Repeats(_Changed):
    """A layer more, as often as chance wants it."""

    most = 0

    def change(self, x: Tensor) -> Tensor:
        calls = 0
        while random.random() < 0.5:
            x, calls = torch.tanh(x), calls + 1
        Repeats.most = max(Repeats.most, calls)
        return x


KINDS: dict[str, Any] = {
    "steps": Steps,
    "repeats": Repeats,
    "seeded": SeededByCode,
    "repeated": Repeated,
    "rare": Rare,
    "chosen": Chosen,
    "shorter": Shorter,
    "mixed": Mixed,
    "begun": Begun,
    "numpy": Masked,
    "python": functools.partial(Masked, by_numpy=False),
    "dropout": functools.partial(Masked, rate=0.2),
    "inner": Inner,
    "uneven": Uneven,
    "later": Later,
    "doubled": Doubled,
    "doubled together": DoubledTogether,
    "branches": Branches,
    "branches together": BranchesTogether,
    "branches for all": BranchesForAll,
    "layerdrop": LayerDrop,
    "rare_layers": functools.partial(LayerDrop, 0.97),
    "layered": Layered,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().double()


def batch(step: int, num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_samples, LENGTH, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)}


def squares(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().mean()


def train(
    kind: str, line: str, loop: str = "step", num_samples: int = NUM_SAMPLES
) -> tuple[list[float], dict[str, Tensor], tuple[str, ...]]:
    """Return losses, the state at the end, and the plan's reasons."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = mw.apply_plan(
        functools.partial(build, kind),
        line,
        loss_fn=squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        seed=SEED,
        sentinel_every=2,
    )
    losses = []
    for step in range(STEPS):
        given = batch(step, num_samples)
        if kind == "steps":
            given["x"] = given["x"][:, step:]
        share = mw.split_batch(given, model)
        if kind in ("later", "begun"):
            model.module.is_late = step > (kind == "begun")
        if loop == "step":
            losses.append(model.step(share).loss)
        else:
            loss = model.loss(share)
            losses.append(float(model.backward(loss)))
            model.optimizer.step()
            model.optimizer.zero_grad()
    return losses, model.full_state_dict(), model.plan.reasons
