"""Training of a model whose pairs all lie in one forward, so that one experiment proves them."""

from __future__ import annotations

import functools

import torch
from tests.parity.jobs.stored_jobs import Trained
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.tensor.search import joint_proofs
from meshwright.apply.tensor.search.regions import Proving
from meshwright.apply.tensor.tensor_layout import Region

NUM_PAIRS, WIDTH, MIXING = 6, 8, 2


class Stages(nn.Module):
    """Pairs of other widths each, one after the other; between the layers of one of them all entries meet."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH + 2 * place for place in range(NUM_PAIRS)]
        self.up = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in widths)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for place, (up, down, norm) in enumerate(zip(self.up, self.down, self.norm, strict=True)):
            inner = up(norm(x))
            inner = inner.softmax(-1) if place == MIXING else inner.tanh()
            x = x + self.drop(down(self.drop(inner)))
        return self.head(x)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    num_samples = 6 + 2 * step
    return (
        torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64),
        torch.randint(4, (num_samples,), generator=generator),
    )


def _loss(outputs: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs, given[1])


def _build() -> nn.Module:
    return Stages().double()


def train(line: str) -> tuple[Trained, list[int]]:
    """Return what training gives, and how many regions this rank's experiments with several have proven or disproved."""
    counts: list[int] = []
    prove = Proving.prove_together

    def counted(self: Proving, scope: str, regions: list[Region]) -> bool:
        counts.append(len(regions))
        return prove(self, scope, regions)

    Proving.prove_together, large, joint_proofs.LARGE_WORK = counted, joint_proofs.LARGE_WORK, 1
    try:
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model = mw.apply_plan(_build, line, loss_fn=_loss, optimizer=sgd, seed=3, sentinel_every=1)
        losses = [model.step(mw.split_batch(_batch(step), model)).loss for step in range(3)]
        reasons, layouts = [str(reason) for reason in model.plan.reasons], dict(model.plan.layouts)
        with model.whole_parameters():
            values = {key: value.detach().clone() for key, value in model.module.named_parameters()}
        model.close()
    finally:
        Proving.prove_together, joint_proofs.LARGE_WORK = prove, large
    return (losses, values, layouts, reasons), counts
