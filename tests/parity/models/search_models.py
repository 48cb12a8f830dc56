"""Models whose first call does not show what they do later.

Each is a class of program for which a layout that was proven with one call, in one mode or for one block was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, LENGTH = 8, 12, 6


def normalised(x: Tensor) -> Tensor:
    """Return an activation that sees all hidden units."""
    return torch.softmax(x, -1)


class Mlp(nn.Module):
    """A feed-forward layer; how it is activated is decided by what neither shapes nor classes show."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = F.gelu, *, temperature: float = 0.0, index: int = 0
    ) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.activation = activation
        self.temperature = temperature
        self.layer_idx = index

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = self.up(x)
        if self.temperature or self.layer_idx % 2:
            h = normalised(h)
        h = self.activation(h)
        return self.down(F.normalize(h, dim=-1) if last else h)


class EvalMlp(Mlp):
    """Mixes its hidden units in eval mode alone."""

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h if self.training else h / h.abs().amax(-1, keepdim=True))


class Block(nn.Module):
    """A norm and a feed-forward layer, on slices of the sequence where nothing speaks against it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Residual(nn.Module):
    """Layers one after the other, with a layer before and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Block) else x + layer(x)
        return self.head(x).mean(1)


class Twice(Residual):
    """Calls one layer twice, the second time in another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.layers[0](x)
        return self.head(x + self.layers[0](x, last=True)).mean(1)


class ManyWays(Residual):
    """Calls one layer with more kinds of arguments than are proven."""

    def forward(self, x: Tensor) -> Tensor:
        for length in range(1, 11):
            x = x + F.pad(
                self.layers[0](x[:, : min(length, LENGTH)].repeat(1, length, 1)).mean(1, keepdim=True), (0, 0)
            )
        return self.head(x).mean(1)


class OverSamples(Block):
    """Mixes samples: wrong on slices of the batch, and right where one slice holds the only sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class OverPositions(Block):
    """Mixes positions: right on slices of a sequence of one position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Aux(Block):
    """Keeps an auxiliary loss of what it sees, for whoever adds it."""

    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.aux = (x.mean((0, 1)) ** 2).sum()
        return super().forward(x)


class HiddenAux(Mlp):
    """Keeps an auxiliary loss of its hidden units, which would be cut."""

    aux: Tensor

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        self.aux = (h.mean((0, 1)) ** 2).sum()
        return self.down(h)


class Average(Block):
    """Keeps a running average of what it sees in a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x - self.average)


class Counting(Block):
    """Counts its calls: the same on shards as of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Dropping(Mlp):
    """Drops hidden units, and what comes out."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, *, last: bool = False) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Words(nn.Module):
    """An embedding of its own kind, and blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, **options)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)


class SquareWeight(nn.Module):
    """A matrix with as many elements as there are hidden units in a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4))
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.cat([x[..., :4] @ self.square.exp(), x[..., 4:]], -1)
        return self.head(x + self.down(F.gelu(self.up(x)))).mean(1)


class Encoder(nn.Module):
    """torch's own encoder, which in eval mode computes a layer in one kernel."""

    def __init__(self, num_heads: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, num_heads, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=num_heads % 2 == 0)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).mean(1)


class ByHand(nn.Module):
    """Weights that functions use: the bias comes before a scale, so that one rank's term of the sum has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(0.5 * torch.ones(WIDTH))
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(F.linear(x, self.first.weight, self.first.bias))
        return torch.matmul(h, self.second.weight.t()).add_(self.second.bias) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "by_hand": lambda: Residual([ByHand(), ByHand()]),
    "activations": lambda: Residual([Mlp(F.gelu), Mlp(normalised), Mlp(F.gelu)]),
    "temperatures": lambda: Residual([Mlp(), Mlp(temperature=0.5)]),
    "indices": lambda: Residual([Mlp(index=index) for index in range(3)]),
    "twice": lambda: Twice([Mlp()]),
    "many_ways": lambda: ManyWays([Mlp()]),
    "eval": lambda: Residual([EvalMlp()]),
    "plain": lambda: Residual([Block(), Block()]),
    "samples": lambda: Residual([OverSamples(), OverSamples()]),
    "positions": lambda: Residual([OverPositions(), OverPositions()]),
    "aux": lambda: Residual([Aux(), Aux()]),
    "hidden_aux": lambda: Residual([HiddenAux(), HiddenAux()]),
    "average": lambda: Residual([Average(), Average()]),
    "counting": lambda: Residual([Counting(), Counting()]),
    "dropping": lambda: Residual([Dropping(), Dropping()]),
    "not_yet_dropping": lambda: Residual([Dropping(0.0), Dropping(0.0)]),
    "max_norm": lambda: Words(max_norm=1.0),
    "by_frequency": lambda: Words(scale_grad_by_freq=True),
    "sparse": lambda: Words(sparse=True),
    "square": SquareWeight,
    "encoder": Encoder,
    "encoder_of_one_head": lambda: Encoder(1),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def batch_of(name: str, num_samples: int, seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (num_samples,), generator=generator)
    if name in ("max_norm", "by_frequency", "sparse"):
        return torch.randint(20, (num_samples, length), generator=generator), targets
    return torch.randn(num_samples, length, WIDTH, generator=generator, dtype=torch.float64), targets
