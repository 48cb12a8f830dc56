"""Saves of two models in one directory: refused, but where the second one says that it replaces what is there."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.run.checkpoints.saving import forget_others

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _model(value: float) -> mw.ParallelModel:
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, value)
    return mw.apply_plan(module, "single", optimizer=SGD)


def test_a_later_trainer_replaces_the_checkpoint_of_an_earlier_one(tmp_path: Path) -> None:
    # A second Trainer with the first one's output_dir, while the script has both: transformers overwrites as well.
    with _model(1.0) as first, _model(2.0) as second:
        mw.save_checkpoint(first, tmp_path, step=3)
        with pytest.raises(mw.CheckpointError, match="another model of this program has saved step 3"):
            mw.save_checkpoint(second, tmp_path, step=3)
        forget_others(second, tmp_path)
        mw.save_checkpoint(second, tmp_path, step=3)
        assert mw.load_checkpoint(first, tmp_path) == 3
        assert first.full_state_dict()["weight"].tolist() == [[2.0, 2.0]]
