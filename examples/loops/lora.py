"""Low-rank adapters on a frozen model (LoRA), with layers of one's own; only the adapters are trained, and only they are saved.

python examples/loops/lora.py [PLAN]
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Adapted(nn.Module):
    """A frozen linear layer, plus a product of two small ones that begins as zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2.0 * self.up(self.down(x))


class Classifier(nn.Module):
    """Inputs [samples, 16] -> logits [samples, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build(rank: int = 4) -> nn.Module:
    """Return a model whose linear layers are frozen and adapted."""
    model = Classifier().requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapted(layer, rank))
    return model.double()


def batch_of(num_samples: int, step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(num_samples, 16, generator=draws, dtype=torch.float64)
    return x, x[:, :10].argmax(dim=1)


def adapters(model: mw.ParallelModel) -> dict[str, Tensor]:
    """Return the trained weights alone, whole, on every rank."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in model.full_state_dict().items() if name in trained}


def train(plan: str = "single", steps: int = 50, samples: int = 33) -> list[float]:
    """Train on every rank; return the losses of the global batch, and at the end the size of the adapters."""
    model = mw.apply_plan(
        build, plan, loss_fn=loss_of, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=1.0
    )
    losses: list[float] = []
    for step in range(steps):
        batch = mw.split_batch(batch_of(samples, step), model)
        losses.append(model.step(batch).loss)  # one loss and one optimizer: `step` runs under pp, too
    losses.append(sum(value.square().sum().item() for value in adapters(model).values()))
    model.close()
    return losses


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits, batch[1])


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "single"
    print(mw.launch(train, mw.Plan.parse(plan).num_ranks, plan)[0][-3:])
