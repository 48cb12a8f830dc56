"""Meshwright: run by `python`, or by torchrun."""

import functools
import os

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))


def make_data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train():
    model = mw.apply_plan(
        build_model,
        "dp=2",
        loss_fn=loss_fn,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        max_grad_norm=1.0,
    )
    for _ in range(5):
        for batch in mw.make_loader(make_data(), model, global_batch_size=16):
            result = model.step(batch)
    return mw.current_world().rank, result.loss


def main():
    rank, loss = train() if "RANK" in os.environ else mw.launch(train, 2)[0]
    if rank == 0:
        print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()
