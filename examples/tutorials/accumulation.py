"""Gradient accumulation: a batch in four micro-batches, whose tokens count, not the micro-batches."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

SGD = functools.partial(torch.optim.SGD, lr=0.1)
PADDING = -100  # a target that does not count


def build_model():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()


def loss_fn(outputs, batch):  # the mean over the targets that count
    return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), ignore_index=PADDING)


def make_batch():
    """Eight sequences of up to 12 tokens; the k-th has 12 - k."""
    tokens = torch.randint(16, (8, 13), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for k in range(8):
        targets[k, 12 - k :] = PADDING
    return tokens[:, :-1], targets


def gradients(plan):
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=SGD)
    loss = model.step(make_batch()).loss
    return loss, torch.cat([gradient.flatten() for gradient in model.full_gradients().values()])


def mean_of_means(parts):
    """The usual loop: each micro-batch's mean loss, divided by their number."""
    torch.manual_seed(0)
    model = build_model()
    inputs, targets = make_batch()
    for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        (loss_fn(model(x), (x, y)) / parts).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def main():
    loss, whole = gradients("single")
    print(f"whole batch: loss {loss:.6f}")
    loss, parts = gradients("micro_batches=4")
    print(f"in 4 micro-batches: loss {loss:.6f}, gradients equal: {torch.allclose(parts, whole, rtol=0, atol=1e-12)}")
    error = (mean_of_means(4) - whole).norm() / whole.norm()
    print(f"mean of the micro-batches' means: gradients wrong by {error:.1%}")


if __name__ == "__main__":
    main()
