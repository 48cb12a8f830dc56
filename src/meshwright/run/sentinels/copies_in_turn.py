"""Comparison, in each step, of 16 KiB of the parameters that ranks hold alike, in turn, in the agreement that they make anyway.

Ranks that have come apart (by a write to `.data` on one of them, or other state of the optimizer) differ in nearly all
entries, so that one of the first looks finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.run.agreement import Saying
from meshwright.run.sentinels.circles import Circle
from meshwright.run.sentinels.digest import digest_of
from meshwright.run.sentinels.writes import is_plain, windows_of

__all__: list[str] = []

_TOPIC = "copies"


class CopiesInTurn:
    """Looks at copies of parameters on the host, the next ones in each step.

    Args:
        engine: The strategy.
        circles: Ranks that may hold the same parameters; the same axes on every rank.
    """

    def __init__(self, engine: Engine, *circles: Circle) -> None:
        self._engine = engine
        self._circles = [circle for circle in circles if not circle.is_alone]
        self._windows: list[list[list[tuple[str, torch.Tensor]]]] = []
        self._places: list[tuple[nn.Parameter, int]] = []
        self._turn = -1
        self._is_over = not self._circles

    def note(self) -> None:
        """Take note of the end of a step: the next part is looked at before the next one."""
        if self._is_over:
            return
        if not self._windows or any(parameter.data_ptr() != place for parameter, place in self._places):
            self._find()
        self._turn += 1

    def forget(self) -> None:
        """Forget what was found: other values were loaded."""
        self._windows, self._turn = [], -1

    def stop(self) -> None:
        """Compare nothing more between sentinels."""
        self._is_over = True

    def _find(self) -> None:
        groups = self._engine.copies_of_state()
        self._windows, self._places = [], []
        for circle in self._circles:
            named = [pair for group, held in groups if set(group.ranks) >= set(circle.ranks) for pair in held]
            held = [
                (name, p) for name, p in named if isinstance(p, nn.Parameter) and p.device.type == "cpu" and is_plain(p)
            ]
            self._places += [(p, p.data_ptr()) for _, p in held]
            self._windows.append(list(windows_of((name, p.detach().view(-1)) for name, p in held)))

    def sayings(self) -> list[Saying]:
        """Return a digest for each circle; the same topics in every step."""
        if self._is_over:
            return [Saying(f"{_TOPIC} {number}", circle, 0) for number, circle in enumerate(self._circles)]
        found = self._windows or [[] for _ in self._circles]
        pairs = zip(self._circles, found, strict=True)
        return [Saying(f"{_TOPIC} {n}", circle, self._digest(windows)) for n, (circle, windows) in enumerate(pairs)]

    def _digest(self, windows: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> int:
        if not windows or self._turn < 0:
            return 0
        return digest_of([part for _, part in windows[self._turn % len(windows)]]) & 2**63 - 1

    def is_topic(self, topics: Sequence[str]) -> bool:
        """Tell whether one of the topics is of this comparison."""
        return any(topic.startswith(_TOPIC) for topic in topics)
