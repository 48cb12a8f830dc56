"""Models as tutorials write them: a small CNN, fully connected nets, a language model from nn.TransformerEncoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.scopes import FULL_GRID
from torch import Tensor, nn

VOCABULARY = 101
WIDE = 2048 if FULL_GRID else 1024
"""Features of the wide model [count]: two buckets by the default sizes, three in the full grid."""


class ConvNet(nn.Module):
    """Two convolutions, each with relu and pooling, then fully connected layers: images of 3 x 32 x 32, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(images)))
        x = torch.flatten(self.pool(F.relu(self.conv2(x))), 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class FeedForward(nn.Module):
    """Two linear layers as attributes."""

    def __init__(self, num_in: int, num_hidden: int, num_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_in, num_hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(num_hidden, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def build_wide_mlp() -> nn.Module:
    """Three wide linear layers; in float64 from the start, which saves a copy of them."""
    sizes = ((WIDE, 2 * WIDE), (2 * WIDE, WIDE), (WIDE, WIDE))
    first, second, third = (nn.Linear(*size, dtype=torch.float64) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)


class EncoderLanguageModel(nn.Module):
    """Embedding, learned positions, nn.TransformerEncoder under a causal mask, and a head.

    Attention here uses the weights of its output layer without calling that layer.
    """

    causal_mask: Tensor

    def __init__(self, num_features: int = 20, num_heads: int = 4, max_length: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, num_features)
        self.positions = nn.Parameter(0.3 * torch.randn(max_length, num_features))
        layer = nn.TransformerEncoderLayer(num_features, num_heads, dim_feedforward=13, dropout=0.0, batch_first=True)
        # Nested tensors are an optimisation of inference, and warn where the mask does not allow them.
        self.encoder = nn.TransformerEncoder(
            layer, num_layers=2, norm=nn.LayerNorm(num_features), enable_nested_tensor=False
        )
        self.head = nn.Linear(num_features, VOCABULARY)
        self.register_buffer("causal_mask", torch.ones(max_length, max_length).triu(1).bool(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.embedding(ids) + self.positions[:length]
        return self.head(self.encoder(hidden, mask=self.causal_mask[:length, :length], is_causal=True))


class SharedBlocks(nn.Module):
    """The idea of ALBERT in plain torch: a small embedding that is projected, one block that runs N times, a tied head."""

    def __init__(self, num_features: int = 24, num_heads: int = 6, embedding_size: int = 7, num_runs: int = 3) -> None:
        super().__init__()
        self.num_runs = num_runs
        self.embedding = nn.Embedding(VOCABULARY, embedding_size)
        self.widen = nn.Linear(embedding_size, num_features)
        self.block = nn.TransformerEncoderLayer(
            num_features,
            num_heads,
            dim_feedforward=13,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.narrow = nn.Linear(num_features, embedding_size)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.widen(self.embedding(ids))
        for _ in range(self.num_runs):
            hidden = self.block(hidden)
        return F.linear(self.narrow(hidden), self.embedding.weight, self.bias)
