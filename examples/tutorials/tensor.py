"""Tensor parallelism: each layer's weights cut over two ranks, where a proof shows that the result is the same."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build_model():
    return nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def train(plan):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    loss = model.step((tokens[:, :-1], tokens[:, 1:])).loss  # ranks of one layer get the same batch
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return loss, model.full_gradients(), shapes, model.plan.reasons


def main():
    loss, gradients, shapes, _ = train("single")
    parts = mw.launch(train, 2, "tp=2")
    print(f"loss on one device {loss:.12f}, on two ranks {parts[0][0]:.12f}")
    largest = max(float((parts[0][1][name] - whole).abs().max()) for name, whole in gradients.items())
    print("every gradient equal within 1e-12:", largest < 1e-12)
    for name in ("0.weight", "1.norm.weight", "1.up.weight", "1.down.weight", "3.weight"):
        print(f"{name}: {shapes[name]}, on each rank {parts[0][2][name]}")
    print("why:", *parts[0][3], sep="\n  ")


if __name__ == "__main__":
    main()
