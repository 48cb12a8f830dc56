"""Prediction held against measurement, in a line."""

from __future__ import annotations

from meshwright.spec.prediction import Prediction
from meshwright.units import format_bytes, format_seconds

__all__: list[str] = []


def held_against(
    prediction: Prediction, *, step_s: float | None, peak_bytes: float | None, sent_bytes: float | None
) -> str:
    """Return the prediction beside what was measured, with the ratios measured over predicted.

    Args:
        prediction: Of one step.
        step_s: The median step [s].
        peak_bytes: The most that any device held [bytes].
        sent_bytes: What a rank sent in a step [bytes].
    """
    parts: list[str] = []
    if step_s is not None:
        ratio = _ratio(step_s, prediction.step_s)
        parts.append(f"{format_seconds(prediction.step_s)} a step predicted, {format_seconds(step_s)} measured{ratio}")
    if peak_bytes is not None:
        ratio = _ratio(peak_bytes, prediction.peak_bytes)
        parts.append(f"{format_bytes(prediction.peak_bytes)} at the peak, {format_bytes(peak_bytes)}{ratio}")
    if sent_bytes is not None:
        predicted = sum(prediction.sent_bytes.values())
        parts.append(f"{format_bytes(predicted)} sent, {format_bytes(sent_bytes)}{_ratio(sent_bytes, predicted)}")
    return "; ".join(parts)


def _ratio(measured: float, predicted: float) -> str:
    return f" ({measured / predicted:.2f})" if predicted > 0 else ""
