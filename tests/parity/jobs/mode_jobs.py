"""Models whose own `train` merges adapters, and a model whose forward moves one layer towards another; ranks import them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tests.parity.jobs.never_wrong_data_jobs import batches, square
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

Found = tuple[list[float], dict[str, Tensor]]
NUM_STEPS = 5


class Adapted(nn.Linear):
    """A frozen layer with an adapter of low rank, which is merged into the weight in eval mode."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.down = nn.Parameter(torch.randn(2, num_inputs) * 0.3)
        self.up = nn.Parameter(torch.randn(num_outputs, 2) * 0.3)
        self.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.is_merged:
            self._merge()
        return self

    def _merge(self) -> None:
        sign = -1.0 if self.is_merged else 1.0
        self.weight.data += sign * (self.up @ self.down)
        self.is_merged = not self.is_merged

    def forward(self, x: Tensor) -> Tensor:
        if self.is_merged:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias) + x @ self.down.t() @ self.up.t()


def build_adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Adapted(8, 8), nn.Tanh(), Adapted(8, 4)).double()


class Averaging(nn.Module):
    """A model whose own forward begins to move a layer towards another one in the third call, as target networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head, self.calls = nn.Linear(6, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 2:
            for mine, theirs in zip(self.layers[3].parameters(), self.layers[0].parameters(), strict=False):
                mine.data.copy_(0.9 * mine.data + 0.1 * theirs.data)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_averaging() -> nn.Module:
    return Averaging().double()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.5)


def planned(build: Callable[[], nn.Module], plan: str) -> Found:
    data = batches(NUM_STEPS)
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=sgd, seed=0) as model:
        losses = []
        for batch in data:
            losses.append(model.step(mw.split_batch(batch, model)).loss)
            losses.append(model.evaluate(mw.split_batch(batch, model))["loss"])
        return losses, model.full_state_dict()


def plain(build: Callable[[], nn.Module]) -> Found:
    torch.manual_seed(0)
    module = build()
    optimizer, losses = sgd(module.parameters()), []
    for batch in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = square(module(batch[0]), batch)
        loss.backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            losses += [loss.item(), square(module(batch[0]), batch).item()]
        module.train()
    return losses, {name: value.clone() for name, value in module.state_dict().items()}


class Scaled(nn.Module):
    """A layer by whose other argument samples decide for one another, in longer batches."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * (1.0 + other.abs().max().item()) if x.shape[1] > 3 else x


class Counted(nn.Module):
    """A layer with a buffer, which counts its calls: each is another one to a proof."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) + self.second(x) + self.shift


class Mixing(nn.Module):
    """A model that begins to mix samples with the first longer batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.counted, self.scaled, self.out = Counted(), Scaled(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        h = self.counted(self.blocks[2](self.blocks[1](first)))
        return self.out(self.scaled(h, first))


def build_mixing() -> nn.Module:
    return Mixing().double()


def train_mixing(plan: str) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(8, length, 8, generator=generator, dtype=torch.float64) for length in (3, 3, 3, 5)]
    with mw.apply_plan(build_mixing, plan, loss_fn=lambda outputs, _: outputs.square().mean(), optimizer=sgd) as model:
        for x in data:
            model.step(mw.split_batch((x, x), model))
