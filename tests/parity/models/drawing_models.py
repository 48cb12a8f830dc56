"""Models that draw random numbers in training: dropout everywhere, drop path, a variational bottleneck, a recurrence."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, HEADS, IMAGE, PATCH = 17, 6, 16, 4, 8, 4


class Block(nn.Module):
    """A block of a transformer with dropout on attention, on both results and inside of the MLP."""

    def __init__(self, drop_path: float = 0.0, *, is_causal: bool = True, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.result = nn.Dropout(0.2), nn.Dropout(0.3)
        self.drop_path, self.is_causal = drop_path, is_causal

    def attend(self, x: Tensor) -> Tensor:
        """Return attention's result."""
        size, length, _ = x.shape
        q, k, v = (
            layer(x).view(size, length, -1, WIDTH // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        p = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.is_causal)
        # Drawn by this module, behind attention's own draw, which a rank without a head does not make.
        return F.dropout(self.out(mixed.transpose(1, 2).reshape(size, length, -1)), 0.3, self.training)

    def path(self, x: Tensor) -> Tensor:
        """Leave out a branch for some samples."""
        if not self.training or not self.drop_path:
            return x
        kept = torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) >= self.drop_path
        return x * kept / (1 - self.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        x = x + self.path(self.attend(self.norm_1(x)))
        return x + self.path(self.result(self.down(self.inner(F.gelu(self.up(self.norm_2(x)))))))


class Gpt(nn.Module):
    """A GPT with dropout everywhere."""

    def __init__(self, *, num_layers: int = 2, checkpoints: bool = False, heads: int = HEADS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(heads=heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [samples, length, vocabulary]."""
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(F.dropout(x, 0.1, self.training)))


class Vit(nn.Module):
    """A ViT with drop path, whose images are patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList(Block(0.25, is_causal=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores [samples, 5]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Vae(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction, means and log variances."""
        mean, log_var = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers, whose stream has the sample in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3)
        self.packed = nn.GRU(WIDTH, WIDTH, 2, dropout=0.3)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [samples, length, vocabulary]."""
        stream, _ = self.lstm(self.tokens(ids.T))
        lengths = 1 + ids[:, 0] % ids.shape[1]
        packed, _ = self.packed(nn.utils.rnn.pack_padded_sequence(stream, lengths, enforce_sorted=False))
        stream = stream + nn.utils.rnn.pad_packed_sequence(packed, total_length=len(stream))[0]
        return self.head(self.drop(stream)).transpose(0, 1)


class Residual(nn.Module):
    """A layer whose last saved tensor is the input of its last product, where a checkpoint ends its repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the layer."""
        return x + self.down(F.dropout(self.up(x).tanh(), 0.3, self.training))


class Residuals(nn.Module):
    """Three such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `vae_loss` takes."""
        for layer in self.layers:
            x = layer(x)
        return x, x, x


class Skipping(nn.Module):
    """Leaves layers out by chance, decided by Python's and NumPy's generators, and drops in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `vae_loss` takes."""
        for layer in self.layers:
            if random.random() < 0.7 and np.random.rand() < 0.8:
                x = x + layer(x).tanh()
        return x, x, x


class Latent(nn.Module):
    """Attention by latent queries and keys, of which a part is every head's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 2 * WIDTH)
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(WIDTH, 8 + 4), nn.LayerNorm(8), nn.Linear(8, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after attention."""
        size, length, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(size, length, -1, 8).transpose(1, 2)
        latent, turned = self.kv_a(x).split([8, 4], -1)
        k, v = self.kv_b(self.kv_norm(latent)).view(size, length, -1, 8).transpose(1, 2).split([4, 4], -1)
        k = torch.cat([k, turned.view(size, 1, length, 4).expand(-1, k.shape[1], -1, -1)], -1)
        p = 0.2 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(size, length, -1))


class Latents(nn.Module):
    """Two such layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Latent() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [samples, length, vocabulary]."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Narrow(nn.Module):
    """Hidden features that are fewer than ranks, and a dropout behind them in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.last = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three views of the result, as the VAE does."""
        h = torch.tanh(self.first(x))
        hidden = F.dropout(torch.tanh(self.up(h)), 0.2, self.training)
        made = self.last(h + F.dropout(self.down(hidden), 0.3, self.training))
        return made, made[..., :4], made[..., 4:8]


class Attentive(nn.Module):
    """Torch's own attention with dropout: once asked for its weights, once with samples first and keys of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.asked = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2)
        self.crossed = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of the next token, [samples, length, vocabulary]."""
        x = self.embed(ids)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        rows = x.transpose(0, 1)
        y = self.asked(rows, rows, rows, attn_mask=mask)[0].transpose(0, 1)
        return self.head(y + self.crossed(y, x, x, attn_mask=mask, need_weights=False)[0])


def token_loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def class_loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of classes."""
    return F.cross_entropy(outputs, batch[1])


def vae_loss(outputs: tuple[Tensor, Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the negative evidence lower bound."""
    made, mean, log_var = outputs
    rest = (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
    return ((made - batch[1]).square().sum(-1) + 0.5 * rest).mean()


def build_gpt() -> nn.Module:
    return Gpt().double()


def build_checkpointed() -> nn.Module:
    return Gpt(checkpoints=True).double()


def build_two_heads() -> nn.Module:
    return Gpt(heads=2).double()


def build_vit() -> nn.Module:
    return Vit().double()


def build_vae() -> nn.Module:
    return Vae().double()


def build_skipping() -> nn.Module:
    return Skipping().double()


def build_residuals() -> nn.Module:
    return Residuals().double()


def build_latents() -> nn.Module:
    return Latents().double()


def build_narrow() -> nn.Module:
    return Narrow().double()


def build_attentive() -> nn.Module:
    return Attentive().double()


def build_lstm() -> nn.Module:
    return Recurrent().double()


def tokens(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a global batch of tokens."""
    source = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=source)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a global batch of images."""
    source = torch.Generator().manual_seed(100 + step)
    pixels = torch.randn(count, 3, IMAGE, IMAGE, generator=source, dtype=torch.float64)
    return pixels, torch.randint(5, (count,), generator=source)


def vectors(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a global batch of vectors, which are their own targets."""
    source = torch.Generator().manual_seed(100 + step)
    x = torch.randn(count, 12, generator=source, dtype=torch.float64)
    return x, x


CASES = {
    "gpt": (build_gpt, token_loss, tokens),
    "gpt-two-heads": (build_two_heads, token_loss, tokens),
    "latents": (build_latents, token_loss, tokens),
    "attentive": (build_attentive, token_loss, tokens),
    "narrow": (build_narrow, vae_loss, vectors),
    "gpt-checkpoint": (build_checkpointed, token_loss, tokens),
    "vit": (build_vit, class_loss, images),
    "vae": (build_vae, vae_loss, vectors),
    "lstm": (build_lstm, token_loss, tokens),
    "skipping": (build_skipping, vae_loss, vectors),
    "residuals": (build_residuals, vae_loss, vectors),
}
"""Name -> the model, its loss, and (step, samples) -> global batch."""
