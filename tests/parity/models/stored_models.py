"""Models whose weights no layer can be cut by: each rank keeps parts of them, which are put together for each use."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, weight_norm

WIDTH, LENGTH, HEADS = 16, 6, 4


class Recurrent(nn.Module):
    """Torch's recurrence, which keeps its weights in a list, too, and drops between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(self.norm(x))[0]


class Hooked(nn.Module):
    """Weights that a hook makes before each call, of lengths and directions along dim 0: inputs, where it is transposed."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.up = weight_norm(nn.ConvTranspose1d(WIDTH, 2 * WIDTH, 2, stride=2))
            self.down = weight_norm(nn.Conv1d(2 * WIDTH, WIDTH, 2, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(self.up(x.mT).sin()), 0.2, self.training).mT


class Experts(nn.Module):
    """All experts' weights in one tensor, and a router of the user's own product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(0.3 * torch.randn(WIDTH, 3))
        self.inner = nn.Parameter(0.3 * torch.randn(3, WIDTH, 2 * WIDTH))
        self.outer = nn.Parameter(0.3 * torch.randn(3, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("...sd,de->...se", x, self.gate).softmax(-1)
        hidden = torch.einsum("...sd,edh->...esh", x, self.inner).relu()
        given = torch.einsum("...esh,ehd->...esd", F.dropout(hidden, 0.2, self.training), self.outer)
        return x + torch.einsum("...esd,...se->...sd", given, weights)


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.sin(2.0 * F.linear(x, self.weight, self.bias)), 0.2, self.training)


class Cosines(nn.Module):
    """Attention by cosines with layers that are never called, and a bias of heads from a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).reshape(b, n, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        places = torch.arange(n, dtype=x.dtype)
        apart = self.bias((places[:, None] - places)[..., None]).permute(2, 0, 1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale + apart
        mixed = F.dropout(scores.softmax(-1), 0.2, self.training) @ v
        return x + F.linear(mixed.transpose(1, 2).reshape(b, n, WIDTH), self.proj.weight, self.proj.bias)


class OfLengthOne(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.normalize(weight, dim=0)


class Parametrised(nn.Module):
    """Weights that a parametrisation normalises over the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.mix, "weight", OfLengthOne())

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mix(x).softmax(-1), 0.2, self.training)


BLOCKS: dict[str, type[nn.Module]] = {
    "recurrent": Recurrent,
    "hooked": Hooked,
    "experts": Experts,
    "sine": Sine,
    "cosines": Cosines,
    "parametrised": Parametrised,
}


def build(name: str, num_blocks: int = 2) -> nn.Module:
    """Return blocks of a kind with a head."""
    torch.manual_seed(5)
    make: Callable[[], nn.Module] = BLOCKS[name]
    return nn.Sequential(nn.Sequential(*(make() for _ in range(num_blocks))), nn.Linear(WIDTH, 3)).double()


def batch(step: int, num_samples: int = 5) -> tuple[Tensor, Tensor]:
    """Return inputs, of another length in each step, and targets."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(num_samples + step, LENGTH + step, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, inputs.shape[:2], generator=generator)
