"""Model parallelism: one process, the layers of one model on two devices, one after the other."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)
DEVICES = ["cpu", "cpu"]  # on a machine with two GPUs: ["cuda:0", "cuda:1"]


def build_model():
    hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(32, 5))


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train(plan, devices=None):
    torch.manual_seed(1)
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD, devices=devices)
    batch = torch.randn(16, 32), torch.randint(5, (16,))
    before = model.ledger.sent_bytes
    losses = [model.step(batch).loss for _ in range(3)]
    return losses, (model.ledger.sent_bytes - before) / 3


def main():
    plan = mw.Plan.parse("model_parallel", 2)
    own_places = plan.replace(stages={str(layer): int(layer >= 2) for layer in range(9)})
    for name, losses, sent in (
        ("one device", *train("single")),
        ("two devices, balanced", *train(plan, DEVICES)),
        ("two devices, own places", *train(own_places, DEVICES)),
    ):
        numbers = " ".join(f"{loss:.6f}" for loss in losses)
        print(f"{name:24} {numbers}   {sent:.0f} bytes sent a step")


if __name__ == "__main__":
    main()
