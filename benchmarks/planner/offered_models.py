"""Small models of many kinds that `offers.py` plans for: what makes each, its batches and its loss. All in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import cases, losses
from torch import Tensor, nn

import gpt
import resnet

CLASSES = 5
VOCABULARY = 29


def deep_mlp() -> nn.Module:
    blocks = [layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), *blocks, nn.Linear(16, 5)).double()


def small_gpt(*, tied: bool) -> nn.Module:
    return gpt.build_gpt(
        vocabulary_size=VOCABULARY,
        max_length=11,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        hidden_size=16,
        ffn_size=24,
        tie_embeddings=tied,
        initializer_std=0.3,
    ).double()


def convnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Four convolutions with their norms, and a head."""
    layers: list[nn.Module] = []
    for narrow, wide in ((3, 8), (8, 8), (8, 12), (12, 12)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1), norm(wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)).double()


def small_resnet(norm: str) -> nn.Module:
    return resnet.build_resnet(
        in_channels=3, num_classes=CLASSES, widths=(6, 8), blocks_per_width=2, norm=norm
    ).double()


class Autoencoder(nn.Module):
    """Images of 8 x 8 to 10 numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
        self.widen = nn.Linear(10, 32)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2, stride=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.widen(self.encoder(x)).unflatten(1, (8, 2, 2)))


class Recommender(nn.Module):
    """A bag of items and a table of users, beside plain features."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, 8, mode="mean")
        self.users = nn.Embedding(31, 8)
        self.features = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 8))
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, items: Tensor, user: Tensor, features: Tensor) -> Tensor:
        return self.top(torch.cat([self.items(items), self.users(user), self.features(features)], 1))


class TwoTowers(nn.Module):
    """An image and a sentence, each through its own tower, and what their sum says."""

    def __init__(self) -> None:
        super().__init__()
        self.sight = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.words = nn.Embedding(VOCABULARY, 16)
        self.reader = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 32))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, CLASSES))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        return self.head(self.sight(image) + self.reader(self.words(ids).mean(1)))


class ScanBlock(nn.Module):
    """A gated linear recurrence along the sequence, as in state space models."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * inner)
        self.step = nn.Linear(inner, inner)
        self.decay = nn.Parameter(torch.zeros(inner))
        self.narrow = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.wide(self.norm(x)).chunk(2, -1)
        keep = torch.exp(-nn.functional.softplus(self.step(values)) * torch.exp(self.decay))
        state, states = torch.zeros_like(values[:, 0]), []
        for place in range(x.shape[1]):
            state = keep[:, place] * state + (1 - keep[:, place]) * values[:, place]
            states.append(state)
        return x + self.narrow(torch.stack(states, 1) * nn.functional.silu(gate))


class Experts(nn.Module):
    """Four experts of which each token takes two; all see all tokens, and gates leave two of them out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.topk(2, dim=-1)
        gates = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
        return x + sum(expert(x) * gates[..., i : i + 1] for i, expert in enumerate(self.experts))


class WordModel(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, make_block: Callable[[], nn.Module], num_blocks: int = 4, width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Translator(nn.Module):
    """A recurrent encoder whose last state begins a recurrent decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.GRU(8, 12, batch_first=True)
        self.decoder = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        _, state = self.encoder(self.words(ids.flip(1)))
        return self.head(self.decoder(self.words(ids), state)[0])


def words(num_samples: int, seed: int) -> Any:
    return cases.language(num_samples, seed, vocabulary=VOCABULARY)


def images(num_samples: int, seed: int) -> Any:
    return cases.large_images(num_samples, seed, size=8, num_classes=CLASSES)


def pictures(num_samples: int, seed: int) -> Any:
    x, _ = images(num_samples, seed)
    return x, x


def orders(num_samples: int, seed: int) -> Any:
    features, targets = cases.regression(num_samples, seed)
    items, _ = cases.language(num_samples, seed, vocabulary=31)
    return {"items": items, "user": items[:, 0], "features": features}, targets


def captions(num_samples: int, seed: int) -> Any:
    image, labels = images(num_samples, seed)
    return (image, words(num_samples, seed)[0]), labels


@dataclasses.dataclass(frozen=True)
class Offered:
    """A model with its data."""

    case: cases.Case
    in_pieces: bool = False
    """Whether what is computed depends on the samples of a micro-batch: then the reference takes the same pieces."""


def _of(
    build: Callable[[], nn.Module], batch: Callable[[int, int], Any], loss_fn: Any, *, in_pieces: bool = False
) -> Offered:
    return Offered(cases.Case(build, batch, loss_fn), in_pieces)


def _tested(name: str, *, in_pieces: bool = False) -> Offered:
    return Offered(cases.find(name), in_pieces)


def _batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width)


MODELS: dict[str, Offered] = {
    "MLP of 7 layers": _of(deep_mlp, cases.regression, losses.square),
    "GPT, tied": _of(functools.partial(small_gpt, tied=True), words, losses.cross_entropy),
    "GPT, untied": _of(functools.partial(small_gpt, tied=False), words, losses.cross_entropy),
    "convnet, GroupNorm": _of(functools.partial(convnet, functools.partial(nn.GroupNorm, 2)), images, cases.classes),
    "convnet, BatchNorm": _of(functools.partial(convnet, _batch_norm), images, cases.classes, in_pieces=True),
    "ResNet, GroupNorm": _of(functools.partial(small_resnet, "group"), images, cases.classes),
    "ResNet, BatchNorm": _of(functools.partial(small_resnet, "batch"), images, cases.classes, in_pieces=True),
    "autoencoder": _of(lambda: Autoencoder().double(), pictures, losses.square),
    "recommender": _of(lambda: Recommender().double(), orders, losses.square),
    "two towers": _of(lambda: TwoTowers().double(), captions, cases.classes),
    "gated scan": _of(lambda: WordModel(lambda: ScanBlock(12, 16)).double(), words, losses.cross_entropy),
    "experts": _of(lambda: WordModel(lambda: Experts(12)).double(), words, losses.cross_entropy),
    "GRU to GRU": _of(lambda: Translator().double(), words, losses.cross_entropy),
    "LSTM, tied": _tested("lstm"),
    "LSTM, packed, and GRU": _tested("recurrent"),
    "one block three times": _tested("tutorial_albert"),
    "nn.TransformerEncoder": _tested("tutorial_encoder"),
    "nn.Transformer": _tested("style_translator"),
    "U-Net": _tested("style_unet"),
    "VGG": _tested("style_vgg"),
    "MLP-Mixer": _tested("style_mixer"),
    "two branches by a flag": _tested("branches"),
    "branch on values": _tested("data_dependent", in_pieces=True),
    "LoRA": _tested("lora"),
    "convolutions, then layers at the root": _tested("tutorial_cnn"),
    "two layers at the root": _tested("tutorial_mlp_100_50_10"),
    "one table for all": _tested("tied"),
    "sparse gradients": _tested("sparse"),
    "modules used again": _tested("shared"),
    "writes in place": _tested("in_place"),
    "checkpoints of its own": _tested("checkpointed"),
    "scalars and vectors": _tested("tiny"),
    "ALBERT (transformers)": _tested("hf_albert"),
    "Llama (transformers)": _tested("hf_llama"),
    "GPT-2 (transformers)": _tested("hf_gpt2"),
    "BERT (transformers)": _tested("hf_bert"),
    "T5 (transformers)": _tested("hf_t5"),
    "ViT (transformers)": _tested("hf_vit"),
    "Mixtral (transformers)": _tested("hf_mixtral"),
}
