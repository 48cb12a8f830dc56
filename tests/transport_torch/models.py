"""Small models, their batches, and plain training of them in one process."""

from __future__ import annotations

import torch
from tests.transport_torch.harness import Numbers, record, record_end
from torch import nn
from torch.nn import functional as F

WIDTH = 12
NUM_HEADS = 4
MODEL_WIDTH = 16
VOCABULARY = 32
LEARNING_RATE = 0.1


class Block(nn.Module):
    """A residual block, so that values stay of order one through a stack of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)  # an odd width: shares of it are unequal
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Sequential):
    """Blocks and a last layer."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__(*(Block(width) for _ in range(num_blocks)), nn.Linear(width, 5))


class Branches(nn.Module):
    """Uses one of two branches, by the step, and has batch statistics for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.even, self.odd = Block(WIDTH), Block(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.head((self.odd if step % 2 else self.even)(self.norm(x)))


class Attention(nn.Module):
    """Causal attention. The number of heads follows from the projections' width: each rank may hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(MODEL_WIDTH, MODEL_WIDTH) for _ in range(3))
        # A bias here would have no effect, and so a gradient that is all noise.
        self.key = nn.Linear(MODEL_WIDTH, MODEL_WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, MODEL_WIDTH // NUM_HEADS)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The other half of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(MODEL_WIDTH, 2 * MODEL_WIDTH), nn.Linear(2 * MODEL_WIDTH, MODEL_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(MODEL_WIDTH), nn.LayerNorm(MODEL_WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model: tokens and targets in, the mean cross-entropy out.

    The loss is taken inside because FSDP warns of a root module whose output is a view, as logits are.
    """

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, MODEL_WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(MODEL_WIDTH)
        self.head = nn.Linear(MODEL_WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return kind().to(dtype)


def vectors(step: int, rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's inputs and targets for `Stack` and `Branches`."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def tokens(step: int, rows: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's inputs and targets for `Transformer`."""
    generator = torch.Generator().manual_seed(200 + step)
    text = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def share(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return a rank's rows; the number of rows is a multiple of the number of ranks."""
    return tensor.chunk(num_ranks)[rank]


def plain_steps(kind: type[nn.Module], num_steps: int, rows: int, dtype: torch.dtype = torch.float64) -> Numbers:
    """Train in this process on whole batches, with SGD: what every parallel run has to come out at."""
    model = build(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    numbers: Numbers = {}
    for step in range(num_steps):
        if kind is Transformer:
            x, y = tokens(step, rows)
            loss = model(x, y)
        else:
            x, y = vectors(step, rows, dtype)
            loss = F.mse_loss(model(x), y)
        loss.backward()
        record(numbers, step, model, loss)
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, model)
    return numbers
