"""Compression: gradients in 8 bits instead of 32, with error feedback. This changes numbers."""

import functools

import torch
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.05)


def build_model():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


def loss_fn(outputs, batch):
    return ((outputs - batch[1]) ** 2).mean()


def train(plans, steps=60):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    batch = inputs, inputs[:, :8].sum(1, keepdim=True) / 4
    found = {}
    for plan in plans:
        model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
        before = model.ledger.sent_bytes
        losses = [model.step(mw.split_batch(batch, model)).loss for _ in range(steps)]
        found[plan] = losses[0], losses[-1], (model.ledger.sent_bytes - before) / steps
        model.close()
    return found


def main():
    plans = ["dp=2", "dp=2,compress=bf16", "dp=2,compress=int8", "dp=2,compress=int4"]
    print(f"{'plan':20} {'first loss':>10} {'last loss':>10} {'bytes sent a step':>18}")
    for plan, (first, last, sent) in mw.launch(train, 2, plans)[0].items():
        print(f"{plan:20} {first:10.4f} {last:10.6f} {sent:18.0f}")


if __name__ == "__main__":
    main()
