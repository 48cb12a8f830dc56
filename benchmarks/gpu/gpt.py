"""A GPT in plain PyTorch, as tutorials write it, in sizes from one that waits for the host to one that fills a GPU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch."""

    layers: int
    hidden: int
    heads: int
    seq: int
    samples: int
    vocab: int = 50304


SIZES = {
    "gpt-4x256": Size(layers=4, hidden=256, heads=4, seq=128, samples=8, vocab=1024),
    "gpt-12x768": Size(layers=12, hidden=768, heads=12, seq=1024, samples=8),
    "gpt-24x1024": Size(layers=24, hidden=1024, heads=16, seq=1024, samples=8),
    "gpt-24x2048": Size(layers=24, hidden=2048, heads=16, seq=1024, samples=8),
}


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.out = nn.Linear(size.hidden, size.hidden)
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        samples, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, blocks, a head of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean of the tokens' cross-entropies, in float32."""
    return F.cross_entropy(outputs.flatten(0, 1).float(), batch[1].flatten())


def batch_of(size: Size, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and the next ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocab, (size.samples, size.seq + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
