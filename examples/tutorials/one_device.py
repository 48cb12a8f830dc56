"""One device: a model under the plan "single" takes the steps of a plain PyTorch loop, bit for bit."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.5)


def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def batches():
    """Five batches: is the sum of four numbers above zero?"""
    inputs = torch.randn(5, 32, 4, generator=torch.Generator().manual_seed(1))
    return list(zip(inputs, (inputs.sum(-1) > 0).long(), strict=True))


def plain_loop():
    torch.manual_seed(0)
    model = build_model()
    optimizer = SGD(model.parameters())
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def main():
    model = mw.apply_plan(build_model, "single", loss_fn=loss_fn, optimizer=SGD, seed=0)
    for step, batch in enumerate(batches()):
        result = model.step(batch)
        print(
            f"step {step}: {result.num_samples} samples, loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}"
        )
    ours, plain = model.full_state_dict(), plain_loop()
    print(
        "weights equal to the plain loop's, bit for bit:", all(torch.equal(ours[name], plain[name]) for name in plain)
    )


if __name__ == "__main__":
    main()
