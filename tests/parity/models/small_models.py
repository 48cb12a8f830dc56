"""Small models with awkward sizes: 7, 13, vocabulary 101, 6 heads over 2 key heads. All in float64."""

from __future__ import annotations

import dataclasses
import warnings

import torch
import torch.nn.functional as F
from tests.parity.models.containers import AttributeOutput
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpt
import lstm
import mlp
import resnet

VOCABULARY = 101


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()


def build_example_mlp() -> nn.Module:
    return mlp.build_mlp(7, 13, 9, 5).double()


def build_gpt(
    tie_embeddings: bool = True, num_heads: int = 6, num_kv_heads: int = 2, hidden_size: int = 24
) -> nn.Module:
    return gpt.build_gpt(
        vocabulary_size=VOCABULARY,
        max_length=11,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden_size=hidden_size,
        ffn_size=13,
        tie_embeddings=tie_embeddings,
        initializer_std=0.3,
    ).double()


def build_untied_gpt() -> nn.Module:
    return build_gpt(tie_embeddings=False)


def build_resnet(norm: str = "group") -> nn.Module:
    return resnet.build_resnet(in_channels=3, num_classes=5, widths=(6, 7), blocks_per_width=1, norm=norm).double()


def build_resnet_batch_norm() -> nn.Module:
    return build_resnet(norm="batch")


def build_lstm() -> nn.Module:
    return lstm.build_lstm(VOCABULARY, 7, 13, num_layers=2, tie_embeddings=True).double()


class Tied(nn.Module):
    """One weight as embedding, as head, and inside a layer of another class; a tied bias and a submodule twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.block = nn.Linear(8, 8)
        self.again = self.block
        self.side = nn.Linear(8, 8)
        self.side.bias = self.block.bias
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.second_head = nn.Linear(8, 13, bias=False)
        self.second_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + torch.tanh(self.again(torch.tanh(self.block(x)))) + self.side(x)
        return self.head(x) + 0.5 * self.second_head(x)


class Branches(nn.Module):
    """Samples choose branch A or B by a flag; a layer is never used, another only in an output that the loss ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 5))
        self.dead = nn.Linear(7, 5)
        self.ignored = nn.Linear(5, 2)

    def forward(self, x: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_zeros(x.shape[0], 5)
        if flag.any():
            out = out.index_put((flag.nonzero().squeeze(1),), self.a(x[flag]))
        if (~flag).any():
            out = out.index_put(((~flag).nonzero().squeeze(1),), self.b(x[~flag]))
        return out, self.ignored(out)


class Adapted(nn.Module):
    """A frozen linear with a trainable rank-2 adapter whose B is not zero."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(size_in, size_out)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, size_in))
        self.b = nn.Parameter(torch.randn(size_out, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def build_lora() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), Adapted(9, 6), nn.LayerNorm(6), Adapted(6, 6), nn.Linear(6, 5))
    model[0].requires_grad_(False)
    model[5].requires_grad_(False)
    return model.double()


class Tiny(nn.Module):
    """Parameters with no dimension, one element, no elements, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.one = nn.Parameter(torch.tensor([0.7]))
        self.rows = nn.Parameter(torch.randn(2, 9))
        self.three = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.column = nn.Parameter(torch.randn(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.rows[:, :7].t()).sum(1, keepdim=True) * self.scale + self.one
        return hidden * self.column.t() + self.three.square().sum() * x[:, :5] + self.rows[:, 7:].sum()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids).sum(1) + self.bag(ids)))


class Shared(nn.Module):
    """A block applied three times in a loop, one norm with two owners, one layer object three times in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
        self.second = nn.Sequential(nn.Linear(7, 7), self.first[1])
        self.repeated = nn.Sequential(*[nn.Linear(7, 7)] * 3)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.first(x))
        x = self.repeated(self.second(x))
        return self.head(x) + 0.1 * self.head(x.flip(1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.second(x.clone())
        x[:, 1:3] = 0.5 * x[:, 3:5]
        x.relu_()
        y = self.head(x)
        y.masked_fill_(y > 2.0, 0.0)
        return y.view(-1, 5)


class OwnLoss(nn.Module):
    """Computes its own mean loss over the labels that are not -100, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> AttributeOutput:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return AttributeOutput(loss=loss, logits=logits)


class Recurrent(nn.Module):
    """A 2-layer bidirectional LSTM with projection over sequences of different lengths, and a GRU time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
        self.gru = nn.GRU(6, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.gru(padded.transpose(0, 1))[0].sum(0)


class GraphNetwork(nn.Module):
    """Message passing over a union of graphs: no input has the sample as dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, edge_index: Tensor, **_: Tensor) -> Tensor:
        received = torch.zeros_like(x).index_add(0, edge_index[1], self.message(x)[edge_index[0]])
        return self.head(torch.tanh(x + received))


class DataDependent(nn.Module):
    """Branches, loop lengths and early exits that depend on values; takes anything as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(7, 7)
        self.negative = nn.Linear(7, 7)
        self.loop = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, **inputs: Tensor) -> Tensor:
        x = inputs["x"]
        x = self.positive(x) if x.sum() > 0 else self.negative(x)
        for _ in range(int(inputs["depth"].max())):
            x = torch.tanh(self.loop(x))
            if x.abs().max() < 0.2:
                break
        return self.head(x)


class Checkpointed(nn.Module):
    """The user's own activation checkpointing around a block that is used twice; another block is unused."""

    def __init__(self, use_reentrant: bool, has_stem: bool = True) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.has_stem = has_stem  # without one the block's inputs have no gradient
        self.stem = nn.Linear(7, 7)
        self.block = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) if self.has_stem else x
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Discriminator(nn.Module):
    """Two forwards through batch statistics before one backward, and a cell whose statistics move four times."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: before a normalisation their gradient is zero, and what is computed for it is rounding.
        self.conv = nn.Conv2d(2, 5, 3, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.cell = nn.Sequential(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 1)

    def score(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        for _ in range(4):
            hidden = hidden + torch.tanh(self.cell(hidden))
        return self.head(hidden)

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.score(real), self.score(fake)


def build_parametrized() -> nn.Module:
    """Weight norm as a parametrization, and a spectral norm whose power iteration moves buffers in each forward."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv1d(1, 3, 3))
    return nn.Sequential(normed, nn.Tanh(), nn.Unflatten(1, (1, 9)), spectral, nn.Flatten(), nn.Linear(21, 5)).double()


def build_old_weight_norm() -> nn.Module:
    """Weight norm by a hook that keeps the computed weight as a plain attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in many models that people have
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(7, 9)), nn.Tanh(), nn.Linear(9, 5)).double()


class MovingAverage(nn.Module):
    """A statistic that is assigned anew in each forward, as users write it, instead of written in place."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y - self.average


class OddLayouts(nn.Module):
    """Parameters that are complex, transposed in memory, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(7, 7, dtype=torch.complex128))
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        turned = (x.to(torch.complex128) @ self.phase).real.to(x.dtype)
        images = (turned @ self.transposed.t()).unflatten(1, (2, 3, 1)).expand(-1, -1, -1, 3)
        return torch.tanh(self.conv(images.contiguous(memory_format=torch.channels_last))).flatten(1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """An object that is no tensor and no container."""

    factor: float


class Keywords(nn.Module):
    """Takes what real models take beside tensors: None, numbers, objects, tensors without dims, flags."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        temperature: Tensor | None = None,
        settings: Settings | None = None,
        **ignored: object,
    ) -> Tensor:
        y = self.body(x) * scale
        y = y if mask is None else y.masked_fill(~mask, 0.0)
        y = y if temperature is None else y / temperature
        return y if settings is None else y * settings.factor


class TaggedParameter(nn.Parameter):
    """A subclass, as tools that mark parameters use it."""


def _count_call(parameter: Tensor) -> None:
    parameter.num_calls = getattr(parameter, "num_calls", 0) + 1  # pyright: ignore[reportAttributeAccessIssue]


def _double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def build_hooked() -> nn.Module:
    """Parameters with attributes, a subclass, a hook that doubles a gradient and one that counts accumulations."""
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).double()
    model[0].bias.requires_grad_(False)
    model[0].weight.tag = "no_decay"
    model[0].weight.register_hook(_double)
    model[2].weight.register_post_accumulate_grad_hook(_count_call)
    model[2].bias = TaggedParameter(model[2].bias.detach().clone())
    return model


class MixedDtypes(nn.Module):
    """float64, float32 and bfloat16 parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.double_part = nn.Linear(7, 7).double()
        self.float_part = nn.Linear(7, 7).float()
        self.half_scale = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.head = nn.Linear(7, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.float_part(torch.tanh(self.double_part(x)).float())
        return self.head((x * self.half_scale).double())
