"""Training over many epochs that saves every few steps, and goes on from the newest checkpoint; ranks import it."""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from tests.faults.jobs.saving_jobs import load_newest
from torch import Tensor, nn

import meshwright as mw
from meshwright.run.checkpoints import live_share

NUM_SAMPLES = 100
GLOBAL_BATCH = 12
"""Not a divisor of the samples: the last batch of each epoch is a smaller one."""
WIDTH = 16


def build(dropout: float) -> nn.Module:
    """Return a network of two layers, in float64."""
    layers = [
        nn.Linear(WIDTH, 32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(32, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 3),
    ]
    return nn.Sequential(*layers).double()


def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
    """Return a mean over samples. The last column of the targets is the sample's number, which counts nowhere."""
    return F.mse_loss(outputs, batch[1][:, :3])


def samples() -> torch.utils.data.TensorDataset:
    """Return samples that carry their number."""
    source = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64, generator=source)
    wanted = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=source)
    numbers = torch.arange(NUM_SAMPLES, dtype=torch.float64).unsqueeze(1)
    return torch.utils.data.TensorDataset(inputs, torch.cat([wanted, numbers], 1))


def digest_of(state: dict[str, Tensor]) -> str:
    """Return a digest of all values of a state dict."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def go_on(
    plan: str, directory: str, num_steps: int, save_every: int, dropout: float, background: bool = False
) -> dict[str, Any]:
    """Train from the newest checkpoint on, and tell the launcher each step's samples.

    Every other save is in the background; with `background`, all are.

    Returns:
        A digest of the parameters, and the parameters themselves.
    """
    live_share.LEAST_BYTES = 1  # this model is small, and saves of large ones read training's memory in place
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    model = mw.apply_plan(functools.partial(build, dropout), plan, loss_fn=loss_fn, optimizer=adam, seed=0)
    loader = mw.make_loader(samples(), model, seed=3, global_batch_size=GLOBAL_BATCH)
    model.world.emit({"pid": os.getpid()})
    step = load_newest(model, directory, extra={"loader": loader})
    model.world.emit({"loaded": step})
    while step < num_steps:
        for batch in loader:
            loss = float(model.step(batch).loss)
            step += 1
            ids = [] if batch is None else batch[1][:, -1].long().tolist()
            model.world.emit({"step": step, "ids": ids, "loss": loss})
            if step % save_every == 0 or step == num_steps:
                in_background = background or step // save_every % 2 == 0
                mw.save_checkpoint(
                    model, directory, step=step, extra={"loader": loader}, keep=2, in_background=in_background
                )
            if step == num_steps:
                break
    mw.wait_for_checkpoint(model)
    state = model.full_state_dict()
    return {"digest": digest_of(state), "state": {name: value.tolist() for name, value in state.items()}}
