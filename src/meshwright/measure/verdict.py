"""Verdict on two runs of the same steps: a row for each parameter and buffer, and whether all are within their bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from meshwright.measure.noise import is_noise
from meshwright.measure.oracle import StepRecord
from meshwright.measure.parity import BufferParity, ParameterParity, ParityReport, relative_difference
from meshwright.measure.resolution import NumericResolution, pairs_of

__all__: list[str] = []


def judge(
    records: Sequence[StepRecord],
    reference: Sequence[StepRecord],
    resolution: NumericResolution,
    *,
    plan: str,
    dtype: torch.dtype,
    moves: Callable[[], Mapping[tuple[int, str, str], float]],
) -> ParityReport:
    """Return the report on a plan's steps.

    Args:
        records: The plan's steps.
        reference: The same steps of one plain process.
        resolution: The bounds.
        plan: The plan, on one line.
        dtype: What both sides computed in.
        moves: Gives what roundings move, as `noise.largest_moves` does; called where only they could explain a difference.
    """
    rows = _WorstRows(resolution)
    rows.add(records, reference)
    if rows.small and not any(rows.places.values()):
        rows = _WorstRows(resolution, moves())
        rows.add(records, reference)
    pairs = list(zip(records, reference, strict=True))
    loss = max(relative_difference(a.loss, b.loss) for a, b in pairs)
    norm = max(relative_difference(a.grad_norm, b.grad_norm) for a, b in pairs)
    bound, found = resolution.bound, resolution.tensors
    loss_bound, norm_bound = max(bound, resolution.loss), max(bound, resolution.grad_norm)
    return ParityReport(
        plan=plan,
        num_steps=len(pairs),
        dtype=_word(dtype),
        bound=bound,
        equal=not any(rows.places.values()) and loss <= loss_bound and norm <= norm_bound,
        losses=tuple((a.loss, b.loss) for a, b in pairs),
        loss_difference=loss,
        grad_norm_difference=norm,
        first_parameter=next(iter(rows.places["gradient"]), None),
        parameters=tuple(
            ParameterParity(
                name=name,
                gradient=rows.worst.get(("gradient", name), 0.0),
                value=difference,
                note=rows.places["gradient"].get(name, ""),
                gradient_bound=found.get(("gradient", name)),
                value_bound=found.get(("value", name)),
            )
            for (kind, name), difference in rows.worst.items()
            if kind == "value"
        ),
        buffers=tuple(
            BufferParity(name=name, value=difference, note=rows.places["buffer"].get(name, ""))
            for (kind, name), difference in rows.worst.items()
            if kind == "buffer"
        ),
        computes_in=None if resolution.dtype is None else _word(resolution.dtype),
        loss_bound=loss_bound if loss_bound > bound else None,
        grad_norm_bound=norm_bound if norm_bound > bound else None,
    )


class _WorstRows:
    """The largest differences of each tensor over all steps, and where they are outside of their bounds at first.

    Args:
        resolution: The bounds.
        moves: What roundings move; None: differences that they could explain are taken for theirs.
    """

    def __init__(
        self, resolution: NumericResolution, moves: Mapping[tuple[int, str, str], float] | None = None
    ) -> None:
        self._resolution = resolution
        self._moves = moves
        self.worst: dict[tuple[str, str], float] = {}
        self.places: dict[str, dict[str, str]] = {"gradient": {}, "buffer": {}}
        self.places["value"] = self.places["gradient"]  # in the order in which they are found, of one parameter
        self.small = False
        """Whether a difference is within its bound only beside other tensors, for which it is small."""

    def add(self, records: Sequence[StepRecord], reference: Sequence[StepRecord]) -> None:
        """Compare the steps."""
        for step, (record, expected) in enumerate(zip(records, reference, strict=True)):
            for kind, got, wanted in pairs_of(record, expected):
                for row in self._resolution.compare(kind, got, wanted):
                    key, bound, relative = (kind, row.name), self._resolution.of(kind, row.name), row.relative
                    if row.own is not None and row.own > bound:
                        self.small = True
                        if self._moves is not None and not is_noise(row.gap, self._moves.get((step, *key), 0.0)):
                            relative = row.own
                    self.worst[key] = max(self.worst.get(key, 0.0), relative)
                    if not relative <= bound:
                        self.places[kind].setdefault(row.name, f"step {step}, {kind}: {row.note}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
