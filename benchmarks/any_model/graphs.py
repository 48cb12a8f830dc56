"""Networks over graphs from layers of PyTorch Geometric: each sample is a graph of as many nodes, with the same edges."""

from __future__ import annotations

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
    """

    def __init__(self, kind: str, width: int = 32, heads: int = 0) -> None:
        super().__init__()
        import torch_geometric.nn as layers  # pyright: ignore[reportMissingImports] - not one of the project's dependencies

        layer: Any = getattr(layers, kind)
        self.first = layer(width, width // heads, heads=heads) if heads else layer(width, width)
        self.second = layer(width, width // heads, heads=heads) if heads else layer(width, width)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 3))
        generator = torch.Generator().manual_seed(7)
        self.register_buffer("edges", torch.randint(0, NODES, (2, EDGES), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Return three scores for each graph.

        Args:
            x: Features, of shape [graphs, nodes, width].
        """
        offsets = NODES * torch.arange(len(x)).repeat_interleave(EDGES)
        edges = self.edges.repeat(1, len(x)) + offsets
        nodes = self.first(x.flatten(0, 1), edges).relu()
        nodes = self.second(nodes, edges).relu()
        return self.head(nodes.view(x.shape).mean(1))
