"""An adversarial pair under one plan: two models, two optimizers, and a loop of one's own.

python examples/loops/gan.py            on one device
python examples/loops/gan.py dp=2       also dp=2,zero=3 and tp=2: the same numbers
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

Adam = functools.partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))


def mlp(num_in: int, num_hidden: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_in, num_hidden), nn.GELU(), nn.Linear(num_hidden, num_out)).double()


def ring(num_samples: int, step: int) -> Tensor:
    """Points on a ring, [num_samples, 2]."""
    angles = torch.rand(num_samples, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * 6.2832
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def noise(num_samples: int, step: int) -> Tensor:
    return torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)


def train(plan: str = "single", steps: int = 50, samples: int = 33) -> list[float]:
    """Train on every rank, and return the losses of critic and generator, those of the global batch."""
    generator = mw.apply_plan(functools.partial(mlp, 8, 64, 2), plan, optimizer=Adam)
    critic = mw.apply_plan(functools.partial(mlp, 2, 64, 1), plan, optimizer=Adam)
    losses: list[float] = []
    for step in range(steps):
        real, z = mw.split_batch((ring(samples, step), noise(samples, step)), generator)
        fake = generator(z)

        critic.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        losses.append(critic.backward(loss, weight=len(real)))
        critic.clip_grad_norm(1.0)
        critic.optimizer.step()

        generator.zero_grad()
        losses.append(generator.backward(F.softplus(-critic(fake)).mean(), weight=len(z)))
        generator.optimizer.step()
    generator.close()
    critic.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "single"
    print(mw.launch(train, mw.Plan.parse(plan).num_ranks, plan)[0][-2:])
