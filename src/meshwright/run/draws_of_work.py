"""Random numbers of a step's forwards, by the places of their samples in the global batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from meshwright.apply.passes import MicroBatch
from meshwright.describe.batches import BatchSplitter
from meshwright.run.agreement import Agreement
from meshwright.run.global_draws import GlobalDraws

__all__: list[str] = []


class DrawsOfWork:
    """The draws of one step, or of one evaluation.

    Args:
        draws: The model's.
        kind: "step" or "evaluate".
        splitter: Counts samples.
    """

    def __init__(self, draws: GlobalDraws, kind: str, splitter: BatchSplitter) -> None:
        self._draws = draws
        self._kind = kind
        self._splitter = splitter

    def placed(self, micro_batches: Sequence[MicroBatch], agreement: Agreement) -> list[MicroBatch]:
        """Return micro-batches with the places of their samples."""
        place = agreement.num_before if self._draws.has_draws else 0
        found: list[MicroBatch] = []
        for micro_batch in micro_batches:
            count = self._splitter.count(micro_batch.batch)
            found.append(dataclasses.replace(micro_batch, first=place, num_samples=count))
            place += count
        return found

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of all forwards and backwards."""
        return self._draws.running(self._kind)

    def forward(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Return the context of one forward."""
        return self._draws.forward(self._kind, micro_batch.first, micro_batch.num_samples, batch=micro_batch.batch)
