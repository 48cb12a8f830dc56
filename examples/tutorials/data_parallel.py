"""Data parallelism: two ranks, each with a copy of the model and its share of the batch; gradients are summed."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)
BATCH = 7  # odd: the ranks' shares differ


def build_model():
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 3)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def batches(steps=3):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield (
            torch.randn(BATCH, 8, generator=generator, dtype=torch.float64),
            torch.randint(3, (BATCH,), generator=generator),
        )


def train(plan):
    """Train on every rank; each returns the losses, its share, and the bytes that it sent in the last step."""
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    losses, samples, sent = [], 0, 0.0
    for batch in batches():
        share = mw.split_batch(batch, model)
        samples, before = len(share[0]), model.ledger.sent_bytes
        losses.append(model.step(share).loss)  # the loss of the whole batch, on every rank
        sent = model.ledger.sent_bytes - before
    return losses, samples, sent


def main():
    alone, *_ = train("single")
    ranks = mw.launch(train, 2, "dp=2")
    print("one device:", *(f"{loss:.6f}" for loss in alone))
    for rank, (losses, samples, _) in enumerate(ranks):
        print(f"rank {rank}, {samples} of {BATCH} samples:", *(f"{loss:.6f}" for loss in losses))
    print("equal:", all(torch.allclose(torch.tensor(losses), torch.tensor(alone)) for losses, *_ in ranks))
    gradient_bytes = 8 * sum(parameter.numel() for parameter in build_model().parameters())
    print(f"gradients: {gradient_bytes} bytes, which a ring of two ranks sends once")
    print(f"rank 0 sent {ranks[0][2]:.0f} bytes in its last step")


if __name__ == "__main__":
    main()
