"""Own loops where random numbers go by the samples' places, which they do not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def test_an_own_backward_with_global_draws_is_refused_and_the_fix_works() -> None:
    batch = torch.ones(4, 3), torch.zeros(4, 1)

    def train(rng: Any) -> float:
        model = mw.apply_plan(
            lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)),
            "single",
            loss_fn=_loss,
            optimizer=torch.optim.SGD,
            rng=rng,
        )
        with model:
            return model.backward(_loss(model(batch[0]), batch))

    with pytest.raises(mw.ApplyError, match="rng='global'"):
        train("global")
    assert train("torch") >= 0
