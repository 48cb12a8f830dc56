"""Models whose values choose the rows that draw: experts of tokens, layers over edges, sequences without padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, NODES = 6, 8, 5


class Expert(nn.Module):
    """An MLP with dropout inside and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.after = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for rows of tokens."""
        return self.after(self.down(self.inner(F.gelu(self.up(x)))))


class Experts(nn.Module):
    """Two experts for each token, those alone that a token has chosen.

    Args:
        way: "loop" as transformers' models choose, "mask", "inline" without modules of their own, "sorted" in one gather; "many"
            are more than the tokens of a batch call.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.num_experts = 40 if way == "many" else 3
        self.router = nn.Linear(WIDTH, self.num_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(self.num_experts))

    def run(self, expert: int, x: Tensor) -> Tensor:
        """Return an expert's result; of "inline" all draws are this module's own."""
        own = self.experts[expert]
        assert isinstance(own, Expert)
        return F.dropout(own.down(F.dropout(own.up(x).tanh(), 0.3)), 0.2) if self.way == "inline" else own(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the experts."""
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        if self.way == "sorted":
            order = chosen.flatten().argsort(stable=True)
            rows, counts = tokens[order // 2], torch.bincount(chosen.flatten(), minlength=3).tolist()
            parts = [own(part) for own, part in zip(self.experts, rows.split(counts), strict=True)]
            result = result.index_add(0, order // 2, torch.cat(parts) * weights.flatten()[order, None])
        for expert in range(0 if self.way == "sorted" else self.num_experts):
            if self.way == "mask":
                mask = (chosen == expert).any(-1).view(x.shape[:-1])
                found = torch.zeros_like(x).masked_scatter(mask[..., None], self.run(expert, x[mask]))
                result = result + found.reshape(-1, WIDTH)
                continue
            rows, place = torch.where(chosen == expert)
            if len(rows):
                found = self.run(expert, tokens[None, rows].reshape(-1, WIDTH)) * weights[rows, place, None]
                result = result.index_add(0, rows, found)
        return x + result.view(x.shape)


class Moe(nn.Module):
    """Two blocks of experts between two layers."""

    def __init__(self, way: str = "loop") -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Experts(way) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        x = F.dropout(self.first(x), 0.1)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(x, 0.1).mean(1))


class OverEdges(nn.Module):
    """Attention over the edges of graphs, and over an edge from each node to itself that follows all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score, self.head = nn.Linear(LENGTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.edges: Tensor
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 1, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each graph, of nodes [graphs, NODES, LENGTH]."""
        nodes = self.layer(x.flatten(0, 1))
        offsets = NODES * torch.arange(len(x)).repeat_interleave(self.edges.shape[1])
        every = torch.arange(len(nodes)).expand(2, -1)
        source, target = torch.cat([self.edges.repeat(1, len(x)) + offsets, every], 1)
        there, here = nodes.index_select(0, source), nodes.index_select(0, target)
        weight = F.dropout(self.score((there + here).tanh()).sigmoid(), 0.3)
        nodes = torch.zeros_like(nodes).index_add(0, target, there * weight)
        return self.head(nodes.view(len(x), NODES, -1).mean(1))


class WithoutPadding(nn.Module):
    """Layers on the entries of sequences that are no padding, beside each other; then experts that choose among these.

    Args:
        layers: Other layers than these.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Expert(), Expert(), Experts("loop")])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        places = (x[..., 0] != 0).flatten().nonzero()[:, 0]
        rows = x.flatten(0, 1)[places]
        for layer in self.layers:
            rows = rows + layer(rows)
        return self.head(torch.zeros_like(x).flatten(0, 1).index_copy(0, places, rows).view(x.shape).sum(1))


class Unpadded(nn.Module):
    """Layers with dropout on the rows of sequences that are no padding, taken in one of many ways.

    Args:
        way: "select" with a mask for each row, "repeat" with one for each element, "gather", "along", "trim" by a mask of the
            longest sample's length; "pack", "pack time" with the steps first, "pack sorted" after the script has sorted samples;
            "join" puts slices together, which nothing follows.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.before, self.layer, self.head = nn.Linear(WIDTH, WIDTH), Expert(), nn.Linear(WIDTH, 3)

    def take(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the rows of `mask` (samples, steps)."""
        flat, places = x.flatten(0, 1), mask.flatten().nonzero()
        if self.way in ("select", "repeat"):
            wide = mask[..., None] if self.way == "select" else mask[..., None].repeat(1, 1, WIDTH)
            return (x.masked_select(wide) if self.way == "select" else x[wide]).view(-1, WIDTH)
        if self.way in ("gather", "along"):
            return flat.gather(0, places.expand(-1, WIDTH)) if self.way == "gather" else flat.take_along_dim(places, 0)
        if self.way == "join":
            return torch.cat([own[:length] for own, length in zip(x, mask.sum(1).tolist(), strict=True)])
        return x[mask]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        mask = x[..., 0] != 0
        if self.way.startswith("pack"):
            return self.head(self.on_packed(x, mask.sum(1).cpu()).sum(1))
        if self.way == "trim":
            longest = int(mask.sum(1).max())
            x, mask = x[:, :longest], mask[:, :longest]
        rows = self.layer(self.before(self.take(x, mask)))
        return self.head(torch.zeros_like(x).index_put((mask,), rows).sum(1))

    def on_packed(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the result of the layers on packed sequences, as padded ones."""
        options = {"batch_first": self.way != "pack time", "enforce_sorted": self.way == "pack sorted"}
        order = lengths.argsort(descending=True) if options["enforce_sorted"] else torch.arange(len(x))
        ready = self.before(x[order])
        given = ready.transpose(0, 1) if self.way == "pack time" else ready
        packed = nn.utils.rnn.pack_padded_sequence(given, lengths[order], **options)
        packed = packed._replace(data=self.layer(packed.data))
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0][order.argsort()]


class Flattened(nn.Module):
    """Layers on the steps of all samples, beside each other, and on windows of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.window, self.head = Expert(), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        rows = self.layer(x.flatten(0, 1))
        windows = F.dropout(self.window(rows.view(-1, 2 * WIDTH)), 0.2, self.training)
        return self.head(rows.view(x.shape).sum(1) + windows.view(len(x), -1, WIDTH).sum(1))


class WithoutPaddingIfAny(WithoutPadding):
    """Leaves padding out where there is some."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        if bool((x[..., 0] != 0).all()):
            return self.head(self.layers[0](x.flatten(0, 1)).view(x.shape).sum(1))
        return super().forward(x)


class Sorted(nn.Module):
    """Sorts all tokens by whether they are padding, for a layer, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Expert(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        order = (x[..., 0] == 0).flatten().argsort(stable=True)
        rows = self.layer(x.flatten(0, 1)[order])[order.argsort()]
        return self.head(F.dropout(rows, 0.2, self.training).view(x.shape).sum(1))


class SortedRecurrent(nn.Module):
    """Sorts samples by their lengths, for an LSTM with dropout on packed sequences, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        lengths, order = (x[..., 0] != 0).sum(1).sort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(F.dropout(x[order], 0.1), lengths.cpu(), batch_first=True)
        rows = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return self.head(F.dropout(rows[order.argsort()].sum(1), 0.2))


class Routed(nn.Module):
    """Leaves padding out, and gives what is left to experts, in one forward: no module stands around the second choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(Expert() for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose padding is zero."""
        mask = x[..., 0] != 0
        rows, result = x[mask], x[mask]
        for expert, own in enumerate(self.experts):
            places = (rows[:, :3].argmax(-1) == expert).nonzero()[:, 0]
            result = result.index_add(0, places, own(rows[places]))
        return self.head(torch.zeros_like(x).index_put((mask,), result).sum(1))


class AllPartsFirst(nn.Module):
    """Chooses the rows of three layers before any of them runs; which rows draw then, their number alone tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample, whose first feature is the number of a row's layer."""
        masks = [x[..., 0] == number for number in range(3)]
        parts = [x[mask] for mask in masks]
        for mask, part, layer in zip(masks, parts, self.layers, strict=True):
            x = x.index_put((mask,), F.dropout(layer(part).tanh(), 0.3, self.training))
        return self.head(x.mean(1))


class Block(nn.Module):
    """A transformer's block with dropout in its attention and after each of its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layer, self.after = Expert(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        ready = self.norms[0](x)
        q, k, v = (part(ready).view(*x.shape[:2], -1, 2).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.mT).softmax(-1), 0.2, self.training)
        x = x + self.after(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.layer(self.norms[1](x))


class OfRealImages(nn.Module):
    """Blocks on the samples that are no padding, as models of several images a sample have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        is_real = (x == 0).flatten(1).sum(1) != LENGTH * WIDTH
        rows = self.first(x[is_real])
        for block in self.blocks:
            rows = block(rows)
        return self.head(torch.zeros_like(x).index_put((is_real,), rows).mean(1))


class BySign(nn.Module):
    """Two experts, one for the tokens below zero, which some ranks' first shares have none of."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(Expert() for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        result = x.flatten(0, 1)
        for below, expert in enumerate(self.experts):
            places = ((x[..., 0] < 0) == below).flatten().nonzero()[:, 0]
            if len(places):
                result = result.index_add(0, places, expert(x.flatten(0, 1)[places]))
        return self.head(result.view(x.shape).mean(1))


def moe(way: str) -> Callable[[], nn.Module]:
    """Return what builds a model of experts."""
    return lambda: Moe(way)


def unpadded(way: str) -> Callable[[], nn.Module]:
    """Return what builds a model without padding."""
    return lambda: Unpadded(way)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{way: moe(way) for way in ("loop", "mask", "inline", "sorted", "many")},
    "edges": OverEdges,
    "unpadded": WithoutPadding,
    "unpadded alone": lambda: WithoutPadding(Expert(), Expert()),
    "unpadded twice": Routed,
    **{f"unpadded {way}": unpadded(way) for way in ("select", "repeat", "gather", "along", "trim", "pack")},
    **{f"unpadded {way}": unpadded(way) for way in ("pack time", "pack sorted")},
    "flattened": Flattened,
    "unpadded images": OfRealImages,
    "by sign": BySign,
}

TOLD: dict[str, Callable[[], nn.Module]] = {
    "parts": AllPartsFirst,
    "unpadded if any": lambda: WithoutPaddingIfAny(Expert()),
    "unpadded sorted": Sorted,
    "unpadded join": unpadded("join"),
    "unpadded lstm": SortedRecurrent,
    "padded lstm": SortedRecurrent,
}
"""Models whose rows are told apart by their number alone; or chosen in no trial."""


_OF_LENGTHS = ("flattened", "sequences", "queries of other lengths")


def batch(name: str, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return samples and labels."""
    generator = torch.Generator().manual_seed(100 + step)
    length = LENGTH - 2 * (step % 2) if name in _OF_LENGTHS else LENGTH
    shape = (count, NODES, LENGTH) if name == "edges" else (count, length, WIDTH)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "by sign" and not step:
        x[: count - 3, :, 0] = x[: count - 3, :, 0].abs()
    if name == "parts":  # as many rows for each layer, but not in the first batch
        numbers = torch.arange(LENGTH) // 2 * torch.ones(count, 1)
        numbers[:, :2] += 0 if step else torch.tensor([[1.0, 1.0], [1.0, 0.0]]).repeat(count, 1)[:count]
        x[..., 0] = numbers.gather(1, torch.rand(count, LENGTH, generator=generator).argsort(1))
    if name.startswith(("unpadded", "padded")):
        is_full = name.startswith("unpadded") and not step
        lengths = (
            torch.full((count,), LENGTH) if is_full else torch.randint(2, LENGTH + 1, (count,), generator=generator)
        )
        lengths[: int(lengths.sum()) % count if step == 1 else 0] -= 1  # as many rows as if all samples had as many
        x *= (torch.arange(LENGTH) < lengths[:, None])[..., None]
    return x, torch.randint(0, 3, (count,), generator=generator)
