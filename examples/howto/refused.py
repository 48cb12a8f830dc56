"""Refusals: a plan, a loss and a forward that Meshwright does not take, and what it says to each."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Gated(nn.Module):
    """Doubles its outputs or not, by a number that its last layer has computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.last(self.second(self.first(x)))
        return 2 * x if x.sum() > 0 else x


def contrastive(outputs, batch):
    """Compares every sample with every other one, so halves of a batch do not have the loss of the whole."""
    del batch
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def mean_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train(build_model, plan, loss_fn):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)
    return model.step(mw.split_batch(batch, model)).loss


def main():
    attempts = {
        "a plan with a typing error": lambda: mw.Plan.parse("dp=2,zerro=1"),
        "a loss that mixes samples": lambda: mw.launch(
            train, 2, functools.partial(nn.Linear, 4, 2), "dp=2,micro_batches=2", contrastive
        ),
        "code that reads a number": lambda: mw.launch(train, 2, Gated, "pp=2,micro_batches=2", mean_loss),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except mw.MeshwrightError as error:
            print(f"# {name}: {type(error).__name__}\n{error}\n")


if __name__ == "__main__":
    main()
