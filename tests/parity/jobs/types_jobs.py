"""Models that read numbers of what tensor parallelism would cut, for ranks to import."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import losses
from torch import Tensor, nn

import meshwright as mw

LARGE = 6.0
"""Above this a hidden entry makes the layer scale itself down."""


class Rescaled(nn.Module):
    """A layer that scales itself by its largest hidden entry, where that is large; and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.num_rescaled = 0

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(self.first(x)))
        largest = h.detach().abs().max()
        if largest > LARGE:
            self.num_rescaled += 1
            h = h / largest
        return self.down(h)


def train_rescaled(plan: str) -> tuple[Any, Any, dict[str, str], list[str], int]:
    """Return gradients of a batch that rescales after one that does not, plain ones, what was cut, why not, and how often."""
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Rescaled().double()
    plain(x)
    small = plain.num_rescaled
    losses.square(plain(40 * x), (x, x.sin())).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with mw.apply_plan(lambda: Rescaled().double(), plan, loss_fn=losses.square, optimizer=_still) as model:
        model.step((x, x.sin()))
        model.step((40 * x, x.sin()))
        count = plain.num_rescaled if small == 0 else -1
        return model.full_gradients(), expected, dict(model.plan.layouts), list(model.plan.reasons), count


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)
