"""Networks over graphs from layers of PyTorch Geometric: each sample is a graph of as many nodes, with the same edges."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

NODES, EDGES = 12, 40


class Graphs(nn.Module):
    """Two layers over all nodes of all graphs of a batch, and a head over each graph's mean.

    Args:
        kind: Name of a layer class of `torch_geometric.nn`.
        width: Features of a node [count].
        heads: Heads of attention, where the layer has them [count].
        way: "widths" where the layer takes its widths, "network" where it takes one of two layers, "edges" the same of pairs.
        more: Further arguments of the layer.
        pooling: Name of a pooling class between both layers, if any.
    """

    def __init__(
        self,
        kind: str,
        width: int = 32,
        heads: int = 0,
        way: str = "widths",
        more: dict[str, Any] | None = None,
        pooling: str = "",
    ) -> None:
        super().__init__()
        layers: Any = importlib.import_module("torch_geometric.nn")
        self.first, self.second = (
            _layer(getattr(layers, kind), width, heads, way, copy.deepcopy(more or {})) for _ in range(2)
        )
        self.pooling = getattr(layers, pooling)(width) if pooling else None
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 3))
        generator = torch.Generator().manual_seed(7)
        self.edges: Tensor
        self.register_buffer("edges", torch.randint(0, NODES, (2, EDGES), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Return three scores for each graph.

        Args:
            x: Features, of shape [graphs, nodes, width].
        """
        offsets = NODES * torch.arange(len(x)).repeat_interleave(EDGES)
        edges = self.edges.repeat(1, len(x)) + offsets
        nodes = self.first(x.flatten(0, 1), edges).relu()
        if self.pooling is None:
            nodes = self.second(nodes, edges).relu()
            return self.head(nodes.view(x.shape).mean(1))
        graphs = torch.arange(len(x)).repeat_interleave(NODES)
        pooling: Any = self.pooling
        if type(pooling).__name__ == "EdgePooling":
            nodes, edges, graphs = pooling(nodes, edges, graphs)[:3]
        else:
            nodes, edges, _, graphs = pooling(nodes, edges, batch=graphs)[:4]
        nodes = self.second(nodes, edges).relu()
        sums = torch.zeros(len(x), nodes.shape[1], dtype=nodes.dtype).index_add(0, graphs, nodes)
        return self.head(sums / NODES)


def _layer(cls: Any, width: int, heads: int, way: str, more: dict[str, Any]) -> nn.Module:
    if way == "widths":
        return cls(width, width // heads, heads=heads, **more) if heads else cls(width, width, **more)
    into = width if way == "network" else 2 * width
    return cls(nn.Sequential(nn.Linear(into, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)), **more)
