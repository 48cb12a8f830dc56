"""Models that draw for rows of which no dim holds the samples in their order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.parity.models.chosen_rows_models import WIDTH, Block, Expert
from torch import Tensor, nn
from torch.nn import functional as F


class Queries(nn.Module):
    """Queries above all documents in one tensor, which one encoder takes, as models of retrieval have it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Expert(), nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        rows = self.encoder(torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)]))
        documents = rows[len(x) :].view(len(x), -1, WIDTH).mean(1)
        return self.head(torch.cat([rows[: len(x)], documents], 1))


class Sequences(Queries):
    """The like with sequences, and dropout inside of attention. Their lengths may differ between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        tokens = torch.stack([x, x.flip(1), x.roll(1, 1)], 1)
        rows = self.encoder(torch.cat([tokens[:, 0], tokens[:, 1:].flatten(0, 1)])).mean(1)
        documents = rows[len(x) :].view(len(x), -1, WIDTH).mean(1)
        return self.head(torch.cat([rows[: len(x)], documents], 1))


class FirstRows(nn.Module):
    """Class tokens of the first rows of (samples x frames), after dropout, as TimeSformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        frames = x.unflatten(1, (2, -1)).flatten(0, 1)
        rows = F.dropout(torch.cat([self.token.expand(len(frames), -1, -1), frames], 1), 0.3, self.training)
        tokens = rows[:, 1:].reshape(len(x), -1, WIDTH)
        return self.head(self.block(torch.cat([rows[: len(x), :1], tokens], 1)).mean(1))


class Noise(nn.Module):
    """Noise of two kinds in one tensor, behind a dim of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        noise = torch.randn(2, len(x) * (1 + x.shape[1]), WIDTH, dtype=x.dtype).sum(0)
        return self.head(self.first(x + noise[len(x) :].view_as(x)).tanh().mean(1) + noise[: len(x)])


class Hidden(nn.Module):
    """Documents beside queries in one tensor that weights of zero hide at first, as residual branches begin.

    Args:
        in_encoder: Whether such a weight scales a second encoder, for queries too; else what the documents give.
    """

    def __init__(self, *, in_encoder: bool) -> None:
        super().__init__()
        self.in_encoder = in_encoder
        self.first, self.second, self.head = Expert(), Expert(), nn.Linear(2 * WIDTH, 3)
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        rows = self.first(torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)]))
        rows = rows + (self.scale if self.in_encoder else 1.0) * self.second(rows)
        documents = rows[len(x) :].view(len(x), -1, WIDTH).mean(1)
        return self.head(torch.cat([rows[: len(x)], documents * (1.0 if self.in_encoder else self.scale)], 1))


class Best(Queries):
    """The largest of each document's features: one set of random numbers shows some documents only."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        rows = self.encoder(torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)]))
        return self.head(torch.cat([rows[: len(x)], rows[len(x) :].view(len(x), -1, WIDTH).amax(1)], 1))


class Masked(Queries):
    """Documents of which the mask of the first batch leaves none.

    Args:
        way: "weigh" by the mask, "where", or "fill" in place.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        rows, mask = self.encoder(torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)])), x[:, 1:, :1] > 100.0
        documents = rows[len(x) :].view(len(x), -1, WIDTH)
        if self.way == "weigh":
            documents = documents * mask
        elif self.way == "where":
            documents = torch.where(mask, documents, 0.0)
        else:
            documents = documents.clone().masked_fill_(~mask, 0.0)
        return self.head(torch.cat([rows[: len(x)], documents.sum(1)], 1))


class Neighbours(nn.Module):
    """A mask that each sample shares with its neighbour: no row is of one sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each sample."""
        mask = F.dropout(torch.ones_like(x[:, 0]), 0.3, self.training)
        return self.head(self.first(x.mean(1) * mask * mask.roll(1, 0)).tanh())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "queries": Queries,
    "sequences": Sequences,
    "first rows": FirstRows,
    "noise": Noise,
    "hidden documents": lambda: Hidden(in_encoder=False),
    "hidden encoder": lambda: Hidden(in_encoder=True),
    "best": Best,
}
UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "neighbours": Neighbours,
    "queries of other lengths": Queries,
    "masked by weight": lambda: Masked("weigh"),
    "masked by where": lambda: Masked("where"),
    "masked in place": lambda: Masked("fill"),
}
