"""Words of a plan that are valid and change nothing are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw


@pytest.mark.parametrize(
    ("plan", "dtype", "told"),
    [
        ("zero=2", torch.float32, "zero=2 shards over dp ranks, and dp=1"),
        ("precision=bf16", torch.float64, "precision=bf16 casts float32, and this model is float64"),
        ("precision=bf16", torch.float32, ""),
        ("zero=1,offload=optimizer", torch.float32, ""),
        ("single", torch.float64, ""),
    ],
)
def test_words_without_effect_are_told(
    plan: str, dtype: torch.dtype, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1, dtype=dtype)
    mw.apply_plan(model, plan, loss_fn=lambda out, _: out.mean(), optimizer=torch.optim.SGD).close()
    texts = [record.getMessage() for record in caplog.records if record.name == "meshwright"]
    assert [told in text for text in texts] == [True] * bool(told)
