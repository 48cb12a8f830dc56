"""Prediction beside measurement, term by term, with ratios and the term that was wrong."""

from __future__ import annotations

import dataclasses

from meshwright.spec.prediction import Prediction
from meshwright.spec.record import Measurement
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []

CLOSE_FRACTION = 0.1
"""A total within this of the prediction is called right [fraction]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostTerm:
    """One term.

    Args:
        name: Its name.
        predicted: In seconds or bytes; None where nothing is predicted.
        measured: The same; None where it was not measured on its own.
        is_total: Whether it is the sum of terms.
        is_part: Whether it is a part of the term above, which was measured as a whole.
        note: A remark on how it was measured.
    """

    name: str
    predicted: float | None
    measured: float | None
    is_total: bool = False
    is_part: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one of them is missing, or nothing was predicted."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


def time_terms(
    prediction: Prediction, measurement: Measurement | None, load_s: float | None, *, is_one_process: bool = False
) -> list[CostTerm]:
    """Return the terms of a step's time.

    Args:
        prediction: The prediction.
        measurement: The measurement, if there was one.
        load_s: Median wait for data in a step; None where it was not told [s].
        is_one_process: Whether the plan's devices belong to one process, which does not see which of them waits.
    """
    time = prediction.time
    step_s = measurement.step_s if measurement is not None else None
    waits = measurement.rank_wait_s if measurement is not None else ()
    wait_s = sum(waits) / len(waits) if waits else None
    compute_s = None
    if step_s is not None and wait_s is not None:
        compute_s = max(0.0, step_s - wait_s - (load_s or 0.0))
    computing = time.forward_s + time.backward_s + time.recompute_s + time.optimizer_s
    waiting = time.bubble_s + time.exposed_comm_s
    parts = [("forward", time.forward_s), ("backward", time.backward_s), ("recompute", time.recompute_s)]
    of_computing = _parts_of([*parts, ("optimizer", time.optimizer_s)])
    of_waiting = _parts_of([("pipeline bubble", time.bubble_s), ("exposed communication", time.exposed_comm_s)])
    if is_one_process:
        terms = [
            CostTerm(
                name="computing and waiting",
                predicted=computing + waiting,
                measured=None if step_s is None else max(0.0, step_s - (load_s or 0.0)),
                note="the step without reading data; one process does not see which of its devices waits",
            ),
            *of_computing,
            *of_waiting,
        ]
    else:
        terms = [
            CostTerm(
                name="computing",
                predicted=computing,
                measured=compute_s,
                note="the step without waiting and without reading data",
            ),
            *of_computing,
            CostTerm(
                name="waiting",
                predicted=waiting,
                measured=wait_s,
                note="time for which a rank stood still for exchanges and other stages, mean over ranks",
            ),
            *of_waiting,
        ]
    return [
        *terms,
        CostTerm(name="reading data", predicted=None, measured=load_s, note="not predicted"),
        CostTerm(name="step", predicted=prediction.step_s, measured=step_s, is_total=True, note="median"),
    ]


def _parts_of(parts: list[tuple[str, float]]) -> list[CostTerm]:
    return [CostTerm(name=name, predicted=predicted, measured=None, is_part=True) for name, predicted in parts]


def memory_terms(prediction: Prediction, measurement: Measurement | None) -> list[CostTerm]:
    """Return the terms of the peak of memory on the fullest rank."""
    memory = prediction.memory
    held = measurement.held_bytes if measurement is not None else {}
    peak = measurement.peak_memory_bytes if measurement is not None else None
    kinds = (
        ("parameters", memory.parameters_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
    )
    rest = peak - sum(held.values()) if peak is not None and held else None
    return [
        *(CostTerm(name=kind, predicted=size, measured=held.get(kind)) for kind, size in kinds),
        CostTerm(
            name="the rest",
            predicted=memory.activations_bytes + memory.buffers_bytes,
            measured=None if rest is None else max(0, rest),
            note="the peak without the terms above; on the CPU with Python, torch and the data",
        ),
        CostTerm(name="activations", predicted=memory.activations_bytes, measured=None, is_part=True),
        CostTerm(name="buffers, workspaces, process", predicted=memory.buffers_bytes, measured=None, is_part=True),
        CostTerm(name="peak", predicted=prediction.peak_bytes, measured=peak, is_total=True, note="fullest rank"),
    ]


def traffic_terms(prediction: Prediction, measurement: Measurement | None) -> list[CostTerm]:
    """Return what a rank sends in a step, by axis."""
    sent = measurement.sent_bytes if measurement is not None else {}
    steps = measurement.num_sent_steps if measurement is not None else 0
    axes = sorted(axis for axis in {*prediction.sent_bytes, *sent} if prediction.sent_bytes.get(axis) or sent.get(axis))
    return [
        CostTerm(
            name=axis,
            predicted=prediction.sent_bytes.get(axis),
            measured=sent[axis] / steps if axis in sent and steps else None,
            note="what ranks agree on; not predicted" if axis not in prediction.sent_bytes else "",
        )
        for axis in axes
    ]


def verdict(terms: list[CostTerm], *, are_bytes: bool) -> str:
    """Return a sentence: whether the total was right, and which term was wrong the most."""
    total = next(term for term in terms if term.is_total)
    if total.ratio is None or total.measured is None or total.predicted is None:
        return f"The {total.name} was not measured, or not predicted."
    show = format_bytes if are_bytes else format_seconds
    head = (
        f"The {total.name} is {show(total.measured)}, {show(total.predicted)} was predicted: "
        f"measured over predicted is {total.ratio:.2f}"
    )
    parts = [term for term in terms if not term.is_total and not term.is_part]
    if any(term.predicted and term.measured is None for term in parts):
        # The largest error among some terms need not be the largest of all.
        return f"{head}. Which term was wrong is not known: the run's end tells the terms, and this one did not."
    known = [term for term in parts if term.measured is not None]
    if not known:
        return f"{head}. No term was measured on its own."

    def error_of(term: CostTerm) -> float:
        return (term.measured or 0.0) - (term.predicted or 0.0)

    worst = max(known, key=lambda term: abs(error_of(term)))
    error = error_of(worst)
    sign = "more" if error > 0 else "less"
    close = "within" if abs(total.ratio - 1) <= CLOSE_FRACTION else "outside"
    return (
        f"{head}, {close} {CLOSE_FRACTION:.0%}. The term that is farthest off is {worst.name}: "
        f"{show(abs(error))} {sign} than predicted."
    )
