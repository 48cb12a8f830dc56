"""Checkpoints: saved under one plan, loaded under another, and the training goes on as if it had not stopped."""

import functools
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

Adam = functools.partial(torch.optim.Adam, lr=1e-2)


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).double()


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def make_dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(4, (60,), generator=generator))


def train(plan, directory, save_at=None, resume=False):
    """Train for one epoch of six steps, or its rest; stop at `save_at` with a checkpoint."""
    model = mw.apply_plan(build_model, plan, loss_fn=loss_fn, optimizer=Adam)
    loader = mw.make_loader(make_dataset(), model, global_batch_size=10)
    step = mw.load_checkpoint(model, directory, extra={"loader": loader}) if resume else 0
    losses = {}
    for batch in loader:
        step += 1
        losses[step] = model.step(batch).loss
        if step == save_at:
            mw.save_checkpoint(model, directory, step=step, extra={"loader": loader})
            break
    return losses


def main():
    with tempfile.TemporaryDirectory() as directory:
        runs = {
            "single, undisturbed": train("single", directory),
            "dp=2,zero=3, stopped": mw.launch(train, 2, "dp=2,zero=3", directory, 3)[0],
            "tp=2, continued": mw.launch(train, 2, "tp=2", directory, None, True)[0],
        }
    for name, losses in runs.items():
        print(f"{name:22}", *(f"{losses[step]:.6f}" if step in losses else 8 * " " for step in range(1, 7)))


if __name__ == "__main__":
    main()
