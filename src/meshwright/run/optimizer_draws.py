"""Random numbers of an optimizer: one stream on all ranks, so that copies of a parameter stay alike; forwards draw their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshwright.apply.engine import Engine
from meshwright.run.diagnose import RandomState

__all__: list[str] = []


class OptimizerDraws:
    """Gives the optimizer generators that are alike on all ranks; an optimizer that adds noise needs them.

    Ranks draw different numbers in their forwards, as dropout has to. An optimizer that draws is refused where ranks hold parts.

    Args:
        engine: The strategy.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state: RandomState | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Draw from the common stream inside the context; every rank enters it."""
        engine = self._engine
        if engine.everyone.size == 1:
            yield
            return
        own = RandomState.read(engine.device)
        if self._state is None:
            with engine.group.ledger.of_checks():
                seeds = engine.everyone.all_gather_json(torch.initial_seed(), device=engine.device)
            torch.manual_seed(seeds[0] + 1)  # not the numbers that the parameters were drawn with
        else:
            self._state.restore(engine.device)
        try:
            yield
        finally:
            self._state = RandomState.read(engine.device)
            own.restore(engine.device)
