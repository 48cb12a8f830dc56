"""A model built under a seed is the same whatever Python's and NumPy's generators gave before, which go on behind it."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from torch import nn

import meshwright as mw


def _build() -> nn.Module:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[random.randrange(2)] = np.random.rand()
    return layer


def _bias(seed: int) -> list[float]:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(_build, "single", loss_fn=lambda out, _: out.mean(), optimizer=sgd, seed=seed) as model:
        return [float(value) for value in model.full_state_dict()["bias"]]


def test_a_build_does_not_know_what_a_script_has_drawn() -> None:
    found: list[list[float]] = []
    following: list[tuple[float, float]] = []
    for start in (1, 2):
        random.seed(start)
        np.random.seed(start)
        found.append(_bias(seed=3))
        following.append((random.random(), np.random.rand()))
    assert found[0] == found[1] != _bias(seed=4)
    random.seed(2)
    np.random.seed(2)
    assert following[1] == (random.random(), np.random.rand())
