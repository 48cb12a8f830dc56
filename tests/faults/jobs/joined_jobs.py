"""What a rank does to itself while ranks join their shares of a batch."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import ItemsView
from typing import Any

from tests.parity.jobs import whole_batch_jobs as whole
from torch import Tensor

import meshwright as mw


class Deadly(dict[str, Tensor]):
    """A batch that kills whoever reads it."""

    def items(self) -> ItemsView[str, Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().items()


def train(line: str, victim: int, last: int) -> None:
    """Train on joined shares; one rank is killed by its last one."""
    model = mw.apply_plan(functools.partial(whole.build, "Contrast"), line, optimizer=whole.sgd)
    for step in range(last + 1):
        share: Any = mw.split_batch(whole.batch(step), model)
        model.step(Deadly(share) if (step, model.world.rank) == (last, victim) else share)
