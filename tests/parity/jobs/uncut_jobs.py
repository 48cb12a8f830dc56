"""Batches that only their author can cut, and models that take them; functions that ranks import."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parity.jobs.loss_jobs import VOCABULARY, mean_square
from torch import Tensor, nn

import meshwright as mw
from meshwright import testing


class Bags(nn.Module):
    """Bags of words of any length: ids one after the other, and where each bag begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCABULARY, 8, mode="mean"), nn.Linear(8, 5)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(ids, offsets))


def bags(num_samples: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([(3 * place) % 5 + 1 for place in range(num_samples)])
    ids = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    return (ids, offsets), torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)


def split_bags(batch: Any, num_parts: int) -> list[Any]:
    (ids, offsets), targets = batch
    ends = [*offsets.tolist(), len(ids)]
    parts, start = [], 0
    for place in range(num_parts):
        stop = start + (len(targets) - start + num_parts - place - 1) // (num_parts - place)
        if stop > start:
            own = offsets[start:stop]
            parts.append(((ids[ends[start] : ends[stop]], own - own[0]), targets[start:stop]))
        start = stop
    return parts


def split_and_lose(batch: Any, num_parts: int) -> list[Any]:
    return split_bags(batch, num_parts)[:-1]


class Graphs(nn.Module):
    """Sums the features of each graph's nodes and of their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = torch.tanh(hidden.index_add(0, edges[1], hidden[edges[0]]))
        return self.head(hidden.new_zeros(int(graph.max()) + 1, 8).index_add(0, graph, hidden))


def graphs(num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([place % 3 + 2 for place in range(num_samples)])
    graph = torch.repeat_interleave(torch.arange(num_samples), sizes)
    starts = sizes.cumsum(0) - sizes
    edges = torch.stack([starts, starts + 1])
    x = torch.randn(len(graph), 4, generator=generator, dtype=torch.float64)
    return {"x": x, "edges": edges, "graph": graph}, torch.randn(
        num_samples, 5, generator=generator, dtype=torch.float64
    )


def split_graphs(batch: Any, num_parts: int) -> list[Any]:
    inputs, targets = batch
    parts = []
    for own in torch.tensor_split(torch.arange(len(targets)), num_parts):
        if len(own):
            nodes = torch.isin(inputs["graph"], own)
            first = int(nodes.nonzero()[0])
            edges = inputs["edges"][:, nodes[inputs["edges"][0]]] - first
            graph = inputs["graph"][nodes] - own[0]
            parts.append(({"x": inputs["x"][nodes], "edges": edges, "graph": graph}, targets[own]))
    return parts


UNCUT = {"bags": (Bags, bags, split_bags), "graphs": (Graphs, graphs, split_graphs)}


def build_uncut(name: str) -> nn.Module:
    return UNCUT[name][0]().double()


def uncut_steps(name: str, line: str) -> list[testing.StepRecord]:
    """Train on batches that only `split` can cut, and that say nothing of how many samples they have."""
    _, batch, split = UNCUT[name]
    build = functools.partial(build_uncut, name)
    return testing.plan_steps(build, mw.Plan.parse(line), [batch(5)], mean_square, split=split)


def losing_step() -> float:
    with mw.apply_plan(
        functools.partial(build_uncut, "bags"), "single,micro_batches=2", split=split_and_lose, loss_fn=mean_square
    ) as m:
        return m.step(bags(5)).loss
