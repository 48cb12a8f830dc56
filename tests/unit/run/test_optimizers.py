"""What may be given as the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [("adam", "gives str"), (lambda _: "adam", "gives str"), (torch.optim.LBFGS, "LBFGS"), (3, "gives int")],
    ids=["text", "gives_text", "LBFGS", "number"],
)
def test_what_is_no_optimizer_of_one_pass_is_refused_with_a_fix_that_works(optimizer: Any, named: str) -> None:
    def train(given: Any) -> float:
        with mw.apply_plan(nn.Linear(2, 1), "single", loss_fn=lambda out, _: out.mean(), optimizer=given) as model:
            return model.step((torch.ones(3, 2), torch.ones(3))).loss

    with pytest.raises(mw.ApplyError) as error:
        train(optimizer)
    assert named in error.value.message
    assert error.value.fix == "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)"
    train(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
