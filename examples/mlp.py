"""The classic two-part experiment: a 2048 -> 4096 -> 2048 -> 2048 MLP on random regression data, in plain PyTorch.

It is what people measure first: one device, then the layers split over two devices, then the batch split over two.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def build_mlp(
    input_size: int = 2048, hidden_size: int = 4096, middle_size: int = 2048, output_size: int = 2048
) -> nn.Sequential:
    """Build three linear layers with ReLU between them."""
    return nn.Sequential(
        nn.Linear(input_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, middle_size),
        nn.ReLU(),
        nn.Linear(middle_size, output_size),
    )


def make_regression(
    split: str = "train", num_samples: int = 1024, input_size: int = 2048, output_size: int = 2048
) -> TensorDataset:
    """Make normal inputs whose targets are a fixed linear map of them, so that there is something to learn.

    The evaluation samples are others than the training samples, and an eighth as many, under the same map.
    """
    linear_map = torch.randn(input_size, output_size, generator=torch.Generator().manual_seed(0)) / input_size**0.5
    if split != "train":
        num_samples = max(1, num_samples // 8)
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    inputs = torch.randn(num_samples, input_size, generator=generator)
    return TensorDataset(inputs, inputs @ linear_map)
