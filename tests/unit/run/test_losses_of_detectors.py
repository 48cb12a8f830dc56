"""Models that give terms of a loss in training mode alone, and draw there: what they draw may decide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw


class Detector(nn.Module):
    """Terms of a loss in training mode, a list of detections in eval mode; one size of images is drawn of one."""

    def __init__(self, *, by_found: bool, draws: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.by_found, self.draws = by_found, draws
        self.sizes = (1.0,)

    def forward(self, x: Tensor, boxes: Tensor) -> Any:
        scale = self.sizes[int(torch.empty(1).uniform_(0, len(self.sizes)))]
        scores = self.body(x * scale)
        if not self.training:
            return list(scores)
        found = (boxes > 0.6).to(x.dtype)
        if self.draws:
            found = found * torch.randint(1, 9, (len(x), 1))
        terms = scores.square() * found
        return {"boxes": terms.sum() / found.sum() if self.by_found else (terms.sum(1) / 4).mean()}


def sum_of_terms(outputs: dict[str, Tensor], _: Any) -> Tensor:
    return torch.stack(list(outputs.values())).sum()


def _step(**kind: bool) -> tuple[float, str]:
    torch.manual_seed(0)
    model = Detector(**kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = mw.apply_plan(model, "micro_batches=2", loss_fn=sum_of_terms, optimizer=optimizer)
    batch = {"x": torch.randn(6, 6, dtype=torch.float64), "boxes": torch.rand(6, 4, dtype=torch.float64)}
    expected = float(sum_of_terms(model(**batch), None).detach())
    loss = applied.step(batch).loss
    assert kind.get("draws") or loss == pytest.approx(expected, rel=1e-11)
    return loss, " ".join(map(str, applied.plan.reasons))


def test_a_mean_is_found_where_only_training_mode_has_a_loss() -> None:
    _, reasons = _step(by_found=False)
    assert "could not be tried out" not in reasons


def test_a_mean_over_what_was_found_in_the_whole_batch_is_refused() -> None:
    with pytest.raises(mw.ApplyError, match="not a mean over samples"):
        _step(by_found=True)


def test_what_is_drawn_and_counts_is_told_as_before() -> None:
    _, reasons = _step(by_found=False, draws=True)
    assert "could not be tried out" in reasons
