"""Layers that stages share, or run by methods, some of whose weights are cut: losses under plans and in a textbook loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.parity.jobs.search_jobs import loss
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw

WIDTH = 16


class Adapter(nn.Sequential):
    """A change of a shared layer's result, which one of its callers alone adds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 2 * WIDTH, bias=False))


class SharedBlock(nn.Module):
    """An MLP that layers at several depths share, with an adapter for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapters = nn.ModuleList(Adapter() for _ in range(2))

    def forward(self, x: Tensor, caller: int) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.adapters[caller](x)))


class Layer(nn.Module):
    """A layer that may call the shared block before its own MLP."""

    def __init__(self, shared: SharedBlock | None, caller: int) -> None:
        super().__init__()
        self.caller = caller
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.shared is None else x + self.shared(x, self.caller)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WithAdapters(nn.Module):
    """Four layers, of which the first and the last share a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = SharedBlock()
        self.layers = nn.ModuleList(Layer(shared if n in (0, 3) else None, n // 3) for n in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention of one head, whose code knows its width."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(len(x), -1, 1, WIDTH).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Encoder(nn.Module):
    """Attention and a layer that are not trained, by a method: nobody calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.layer = Attention(), Layer(None, 0)

    def encode(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(self.attention(x).tanh()) * 2


class WithEncoder(nn.Module):
    """Layers after an encoder whose method runs between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder()
        self.layers = nn.ModuleList(Layer(None, 0) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder.encode(x.view(len(x), 1, WIDTH).expand(-1, 3, -1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Around(nn.Module):
    """An MLP by the code around two layers, whose shards pass through that code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(None, 0), Layer(None, 0)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.last(self.first(x)))))


class OfOneLayer(nn.Module):
    """A model whose only layer holds all others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Around()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapters": WithAdapters,
    "encoder": WithEncoder,
    "one layer": OfOneLayer,
}


def trained(name: str, plan: str) -> tuple[list[float], list[float]]:
    """Return losses under the plan and in a textbook loop."""
    batches = [
        (torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).double(), torch.arange(5))
        for seed in range(3)
    ]
    expected = losses_of(MODELS[name]().double(), batches, loss)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(MODELS[name]().double(), plan, loss_fn=loss, optimizer=sgd, seed=0) as model:
        return [model.step(batch).loss for batch in batches], expected
