"""Two towers and a contrastive loss over the global batch (as CLIP has it), with features gathered from all ranks.

python examples/loops/contrastive.py [PLAN]
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Towers(nn.Module):
    """Features of pairs, each [samples, features], and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)


def pairs(num_samples: int, step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    images = torch.randn(num_samples, 12, generator=draws, dtype=torch.float64)
    return images, images[:, ::2] + 0.1 * torch.randn(num_samples, 6, generator=draws, dtype=torch.float64)


def train(plan: str = "single", steps: int = 50, samples: int = 33) -> list[float]:
    """Train on every rank, and return the losses of the global batch."""
    model = mw.apply_plan(
        lambda: Towers().double(), plan, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=1.0
    )
    losses: list[float] = []
    for step in range(steps):
        images, texts = mw.split_batch(pairs(samples, step), model)
        image_features, text_features = model(images, texts)
        all_images, all_texts = mw.gather_batch(image_features, model), mw.gather_batch(text_features, model)
        logits = all_images @ all_texts.T  # [global batch, global batch], on every rank
        targets = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        model.zero_grad()
        losses.append(model.backward(loss, weight=len(images)))
        model.optimizer.step()
    model.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "single"
    print(mw.launch(train, mw.Plan.parse(plan).num_ranks, plan)[0][-2:])
