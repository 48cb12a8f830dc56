"""ZeRO: two ranks that share a batch share the optimizer's state too, then gradients, then parameters."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

Adam = functools.partial(torch.optim.Adam, lr=1e-2)


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def make_batch():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (8,), generator=generator)


def train(plans):
    found = {}
    for plan in plans:
        model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=Adam)
        losses = [model.step(mw.split_batch(make_batch(), model)).loss for _ in range(5)]
        found[plan] = losses[-1], model.held_bytes()
        model.close()
    return found


def main():
    plans = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3,whole_below=0"]
    loss, held = train(["single"])["single"]
    print(f"{'plan':26} {'loss':>10} {'parameters':>11} {'gradients':>10} {'optimizer':>10}   bytes on rank 0")
    rows = {"single": (loss, held), **mw.launch(train, 2, plans)[0]}
    for plan, (loss, held) in rows.items():
        print(f"{plan:26} {loss:10.6f} {held['parameters']:11} {held['gradients']:10} {held['optimizer']:10}")


if __name__ == "__main__":
    main()
