"""Ranks of `launch` that train without an end, and heed what `harmed` finds in their folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.faults.jobs import harmed
from torch import Tensor

import meshwright as mw

WARM_STEPS = 5


def train(plan: str, folder: str, plain: bool) -> int:
    """Train until asked to stop; return the step. Rank 0 makes the file `warm` after some steps."""
    os.chdir(folder)
    samples = harmed.Samples()
    with mw.apply_plan(harmed.build_plain if plain else harmed.build, plan, loss_fn=_loss, seed=0) as model:
        step = 0
        while not model.stop_requested:
            first = step * 8 % harmed.NUM_SAMPLES
            items = [samples[index] for index in range(first, first + 8)]
            inputs, targets = (_stacked([item[place] for item in items]) for place in (0, 1))
            mw.join_world().report_progress(step, "step")
            model.step(mw.split_batch((inputs, targets), model))
            step += 1
            if step == WARM_STEPS and model.world.rank == 0:
                Path("warm").touch()
        return step


def _loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors)
