"""What came of a program: equal, whole, refused or caught; wrong, hung and crashed are bugs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

BOUND = 1e-9
"""Largest relative difference that counts as equal."""
_NOISE = 1e-13
"""A difference below this share of the largest entry of all tensors of its kind is rounding: gradients that are zero in exact
arithmetic (the bias of a key, of what is normalised) hold nothing else."""
_NOISE_OF = {"values": 1e-11}
"""Adam divides such gradients by their own size, so that a bias which starts at zero holds magnified rounding."""

SMALL = 1e-4
"""Up to here a difference may be rounding that the model has made large; the plain loop is asked."""
_ROUNDINGS = 16.0
"""How many times as far as the plain loop's results move, when the last bits of its parameters do, still counts as rounding."""

GOOD = ("equal", "whole", "refused", "caught")
BUGS = ("wrong", "hung", "crashed")


@dataclasses.dataclass
class Verdict:
    """How a program ended."""

    kind: str
    detail: str = ""
    largest: float = 0.0
    """Largest relative difference seen, of all that was compared."""
    cut: float | None = None
    """Share of the parameters that were cut, under tensor parallelism."""
    action: int | None = None
    """Where in the script it ended, or differed first."""


def judge(
    reference: list[dict[str, Any]],
    ranks: Sequence[dict[str, Any]] | BaseException,
    describe: Any,
    *,
    is_random: bool = False,
    draws_apart: bool = False,
) -> Verdict:
    """Return the verdict.

    Args:
        reference: The plain loop's records.
        ranks: What each rank returned, or the exception that the whole call raised.
        describe: `candidate.describe_error`.
        is_random: The model draws numbers: only the ranks' copies are compared.
        draws_apart: Ranks draw apart, so that calls of the model outside of steps give other outputs on each.
    """
    if isinstance(ranks, BaseException):
        error = describe(ranks)
        is_hang = error["is_hang"] or isinstance(ranks, TimeoutError)
        return Verdict("hung" if is_hang else "crashed", _text(error))
    differences = [] if is_random else [d for rank in ranks for d in compare(rank["records"], reference)]
    largest = max((size for size, _, _ in differences), default=0.0)
    errors = [rank["error"] for rank in ranks if rank["error"] is not None]
    cut = ranks[0].get("cut")
    reached = min(len(rank["records"]) for rank in ranks)
    if errors:
        verdict = _of_errors(errors, len(ranks))
        verdict.largest, verdict.cut, verdict.action = largest, cut, reached
        if verdict.kind in ("hung", "crashed"):
            return verdict
    else:
        is_whole = cut is not None and cut == 0.0
        verdict = Verdict("whole" if is_whole else "equal", "; ".join(ranks[0]["reasons"][:2]), largest, cut)
    first = next((d for d in differences if not d[0] <= BOUND), None) or _between_ranks(ranks, draws_apart=draws_apart)
    if first is not None:
        prefix = f"before {errors[0]['type']}: " if errors else ""
        return Verdict("wrong", f"{prefix}{first[2]} off by {first[0]:.1e}", largest, cut, first[1])
    return verdict


def _of_errors(errors: list[dict[str, Any]], num_ranks: int) -> Verdict:
    foreign = next((error for error in errors if not error["is_ours"]), None)
    hang = next((error for error in errors if error["is_hang"]), None)
    first = next((error for error in errors if not error["is_hang"]), errors[0])
    if hang is not None:
        return Verdict("hung", f"{_text(first)} | {_text(hang)}" if first is not hang else _text(hang))
    if foreign is not None:
        return Verdict("crashed", _text(foreign))
    if first["exit_code"] in (1, 70):
        return Verdict("crashed", _text(first))
    if first["exit_code"] == 15:
        return Verdict("crashed" if first["type"] == "NonFiniteError" else "caught", _text(first))
    if len(errors) < num_ranks:
        return Verdict("crashed", f"on {len(errors)} of {num_ranks} ranks: {_text(first)}")
    without = next((error for error in errors if not error["fix"]), None)
    if without is not None:
        return Verdict("crashed", f"no fix: {_text(without)}")
    return Verdict("refused", _text(first))


def _text(error: dict[str, Any]) -> str:
    return f"{error['type']}: {' '.join(error['message'].split())[:400]}"


def compare(records: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Iterator[tuple[float, int, str]]:
    """Yield (relative difference, action, what) for everything that both sides recorded."""
    for got, expected in zip(records, reference, strict=False):
        place = f"action {expected['action']} ({expected['do']})"
        for key, value in expected.items():
            if key in ("action", "do"):
                continue
            if isinstance(value, dict):
                for name, size in tensors(got[key], value, _NOISE_OF.get(key, _NOISE)):
                    yield size, expected["action"], f"{place} {key} {name}"
            else:
                size = abs(got[key] - value) / abs(value) if value else abs(got[key])
                yield size if math.isfinite(size) else math.inf, expected["action"], f"{place} {key}"


def tensors(got: dict[str, Any], expected: dict[str, Any], noise: float = _NOISE) -> Iterator[tuple[str, float]]:
    """Yield (name, relative difference to the tensor's largest entry)."""
    overall = max((float(np.abs(a).max()) for a in expected.values() if a is not None and a.size), default=0.0)
    for name, right in expected.items():
        yield name, _difference(got.get(name), right, noise * overall, overall) if name in got else math.inf
    for name in got:
        if name not in expected:
            yield f"{name} (only under the plan)", math.inf


def _difference(left: Any, right: Any, noise: float, overall: float) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    if not right.size:
        return 0.0
    gap = float(np.abs(left - right).max()) if right.dtype != np.bool_ else float((left != right).any())
    if not math.isfinite(gap):
        return math.inf
    scale = float(np.abs(right).max())
    if gap <= noise:
        scale = max(scale, overall)
    return gap / scale if scale else (0.0 if gap == 0.0 else math.inf)


def is_rounding(
    ranks: Sequence[dict[str, Any]], reference: list[dict[str, Any]], moved: Sequence[list[dict[str, Any]]]
) -> bool:
    """Tell whether differences are as large as those of the plain loop from itself, its parameters moved by their last bits."""
    own: dict[str, float] = {}
    for records in moved:
        for size, _, what in compare(records, reference):
            own[what] = max(own.get(what, 0.0), size)
    found = [d for rank in ranks for d in compare(rank["records"], reference)]
    return all(size <= BOUND or size <= _ROUNDINGS * own.get(what, 0.0) for size, _, what in found)


def _between_ranks(ranks: Sequence[dict[str, Any]], *, draws_apart: bool) -> tuple[float, int, str] | None:
    """Return where ranks differ by as much as a bit, or None."""
    for number, rank in enumerate(ranks[1:], start=1):
        for size, action, what in compare(rank["records"], ranks[0]["records"]):
            if size > 0.0 and not (draws_apart and "(forward)" in what):
                return size, action, f"rank {number} against rank 0, {what}"
    return None
