"""Columns that feed several rows, and rows whose input is put together of several columns' results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.apply.tensor.search.search import Search
from meshwright.apply.tensor.tensor_layout import TensorLayout

WIDTH, HEADS, HIDDEN = 16, 4, 24


def heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


class TwoStreams(nn.Module):
    """Words and patches attend together; each stream has projections of its own, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.patches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_of_words, self.out_of_patches = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            torch.cat([heads(one(words), WIDTH // HEADS), heads(other(patches), WIDTH // HEADS)], 2)
            for one, other in zip(self.words, self.patches, strict=True)
        )
        mixed = F.scaled_dot_product_attention(query=q, key=k, value=v).transpose(1, 2).flatten(2)
        first, second = mixed.split([words.shape[1], patches.shape[1]], 1)
        return words + self.out_of_words(first), patches + self.out_of_patches(second)


class Beside(nn.Module):
    """Attention and an MLP side by side, with one projection of both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH + HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), WIDTH // HEADS) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(torch.cat([mixed, F.gelu(self.up(x))], -1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint, self.beside = TwoStreams(), Beside()

    def forward(self, x: Tensor) -> Tensor:
        words, patches = self.joint(x[:, :3], x[:, 3:])
        return self.beside(torch.cat([words, patches], 1))


class Branches(nn.Module):
    """Convolutions of two sizes side by side, and a norm over both, as in networks of images."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 12, 3, padding=1)
        self.norm, self.after = nn.GroupNorm(20, 20), nn.Conv2d(20, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.relu(self.norm(torch.cat([self.near(x), self.far(x)], 1)))).mean((2, 3))


class Heads(nn.Module):
    """A hidden layer that feeds two others, as the mean and the variance of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.spread = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.hidden(x))
        return self.mean(h), F.softplus(self.spread(h))


class Folded(nn.Module):
    """Attention whose number of heads fits any width: nothing raises on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Tail(nn.Module):
    """Three layers, of which the first takes what a layer outside has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tailed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.tail = nn.Linear(WIDTH, HIDDEN), Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.before(x)))


def layout_of(net: nn.Module, x: Tensor) -> TensorLayout:
    torch.manual_seed(0)
    return Search(net.double(), 2, lambda copy: copy(x)).layout()


def roles_in(layout: TensorLayout) -> dict[str, str]:
    return {name: role for region in layout.regions for name, role in region.roles.items()}


def test_streams_that_attend_together_have_two_rows() -> None:
    roles = roles_in(layout_of(Net(), torch.randn(2, 8, WIDTH).double()))
    columns = {f"joint.{stream}.{place}" for stream in ("words", "patches") for place in range(3)}
    assert {name for name, role in roles.items() if role == "row" and name.startswith("joint")} == {
        "joint.out_of_words",
        "joint.out_of_patches",
    }
    assert {name for name, role in roles.items() if role == "column" and name.startswith("joint")} == columns


def test_what_is_put_together_keeps_its_parts() -> None:
    layout = layout_of(Net(), torch.randn(2, 8, WIDTH).double())
    region = next(region for region in layout.regions if "beside.down.weight" in region.cuts)
    assert region.cuts["beside.down.weight"].groups == (WIDTH, HIDDEN)
    assert {"beside.q.weight", "beside.k.weight", "beside.v.weight", "beside.up.weight"} <= region.cuts.keys()


def test_branches_of_convolutions_are_columns_of_what_follows() -> None:
    layout = layout_of(Branches(), torch.randn(2, 3, 5, 5).double())
    region = next(region for region in layout.regions if "after.weight" in region.cuts)
    assert region.cuts["after.weight"].groups == (8, 12)
    assert {"near.weight", "far.weight"} <= region.cuts.keys()


def test_a_hidden_layer_of_two_heads_is_their_column() -> None:
    roles = roles_in(layout_of(Heads(), torch.randn(4, WIDTH).double()))
    assert roles == {"hidden": "column", "mean": "row", "spread": "row"}


def test_a_number_of_heads_that_fits_any_width_is_the_shards() -> None:
    layout = layout_of(nn.Sequential(Folded(), nn.Tanh()), torch.randn(2, 5, WIDTH).double())
    (region,) = layout.regions
    assert ("0", "heads") in region.integers


def test_a_module_that_shards_enter_is_no_region_of_its_own() -> None:
    # Its guard would prove its calls on whole tensors, and is given shards.
    layout = layout_of(Tailed(), torch.randn(4, WIDTH).double())
    spanning = [region for region in layout.regions if {"before.weight", "tail.first.weight"} <= region.cuts.keys()]
    assert len(spanning) == 1
    assert not any(region.scope == "tail" for region in layout.regions)
