"""A variational autoencoder in a loop of one's own; a sample's noise is drawn with the data, so that no plan changes it.

python examples/loops/vae.py [PLAN]
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Autoencoder(nn.Module):
    """Images [samples, 64] and noise [samples, 4] -> images again, and mean and log variance of the code, [samples, 4] each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 48), nn.GELU(), nn.Linear(48, 64))

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean + noise * torch.exp(log_variance / 2)
        return self.decoder(code), mean, log_variance


def batch_of(num_samples: int, step: int) -> tuple[Tensor, Tensor]:
    """Stripes of random place and width, and noise."""
    draws = torch.Generator().manual_seed(step)
    place = torch.rand(num_samples, 2, generator=draws, dtype=torch.float64)
    images = torch.sin(torch.linspace(0, 6.3, 64, dtype=torch.float64) * (1 + 3 * place[:, :1]) + place[:, 1:])
    return images, torch.randn(num_samples, 4, generator=draws, dtype=torch.float64)


def train(plan: str = "single", steps: int = 50, samples: int = 33) -> list[float]:
    """Train on every rank, and return the losses of the global batch: minus the evidence lower bound."""
    model = mw.apply_plan(lambda: Autoencoder().double(), plan, optimizer=functools.partial(torch.optim.AdamW, lr=3e-3))
    losses: list[float] = []
    for step in range(steps):
        images, noise = mw.split_batch(batch_of(samples, step), model)
        decoded, mean, log_variance = model(images, noise)
        distance = F.mse_loss(decoded, images, reduction="none").sum(dim=1)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        model.zero_grad()
        losses.append(model.backward((distance + divergence).mean(), weight=len(images)))
        model.clip_grad_norm(1.0)
        model.optimizer.step()
    model.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "single"
    print(mw.launch(train, mw.Plan.parse(plan).num_ranks, plan)[0][-2:])
