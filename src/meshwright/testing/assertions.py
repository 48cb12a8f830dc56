"""Assertions that two runs are equal, which name the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from meshwright.measure.oracle import StepRecord
from meshwright.measure.parity import compare_tensors, relative_difference

__all__: list[str] = []

_ROWS_SHOWN = 12


def assert_parity(
    candidate: Sequence[StepRecord] | StepRecord | Mapping[str, Tensor | None],
    reference: Sequence[StepRecord] | StepRecord | Mapping[str, Tensor | None],
    tolerance: float = 1e-11,
    *,
    buffers: bool = False,
) -> None:
    """Fail where the candidate differs from the reference, naming the first parameter that does.

    Every tensor's difference is taken relative to the reference's largest entry in that tensor, never to a norm over all of
    them, in which one lost small gradient would disappear. A difference below 16 roundings of the largest entry of all tensors
    is taken for noise here; `verify_plan` asks one process more whether it is.

    Args:
        candidate: Records of steps, or named tensors of any shape; None stands for a tensor that is not there.
        reference: The same kind of thing, in the same shapes.
        tolerance: Largest relative difference allowed.
        buffers: Compare the buffers of step records too.

    Raises:
        AssertionError: They differ; the message lists step, kind and parameter, the first difference first.

    >>> import torch
    >>> assert_parity({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> assert_parity({"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)})
    Traceback (most recent call last):
    AssertionError: 1 of 1 tensors differ by more than 1e-11 (relative to their largest entry); the first is w: ...
    """
    rows = list(_rows(candidate, reference, buffers=buffers))
    outside = [(name, relative, note) for name, relative, note in rows if not relative <= tolerance]
    if not outside:
        return
    name, relative, note = outside[0]
    lines = [
        f"{len(outside)} of {len(rows)} tensors differ by more than {tolerance:.0e} (relative to their largest entry);"
        f" the first is {name}: {relative:.1e}, {note}"
    ]
    lines += [f"  {relative:.1e}  {name}  {note}" for name, relative, note in outside[:_ROWS_SHOWN]]
    if len(outside) > _ROWS_SHOWN:
        lines.append(f"  ... and {len(outside) - _ROWS_SHOWN} more")
    raise AssertionError("\n".join(lines))


def _rows(candidate: object, reference: object, *, buffers: bool) -> Iterator[tuple[str, float, str]]:
    if isinstance(reference, Mapping) and isinstance(candidate, Mapping):
        for row in compare_tensors(candidate, reference):
            yield row.name, row.relative, row.note
    elif isinstance(reference, StepRecord) and isinstance(candidate, StepRecord):
        yield from _record_rows("", candidate, reference, buffers=buffers)
    elif isinstance(reference, Sequence) and isinstance(candidate, Sequence):
        if len(candidate) != len(reference):
            raise AssertionError(f"{len(candidate)} steps were recorded, the reference has {len(reference)}")
        for step, (got, expected) in enumerate(zip(candidate, reference, strict=True)):
            yield from _record_rows(f"step {step} ", got, expected, buffers=buffers)
    else:
        raise TypeError(f"cannot compare {type(candidate).__name__} with {type(reference).__name__}")


def _record_rows(
    prefix: str, candidate: StepRecord, reference: StepRecord, *, buffers: bool
) -> Iterator[tuple[str, float, str]]:
    for kind in ("loss", "grad_norm"):
        got, expected = getattr(candidate, kind), getattr(reference, kind)
        yield f"{prefix}{kind}", relative_difference(got, expected), f"{got!r} instead of {expected!r}"
    for kind in ("gradients", "parameters", "buffers") if buffers else ("gradients", "parameters"):
        for row in compare_tensors(getattr(candidate, kind), getattr(reference, kind)):
            yield f"{prefix}{kind} {row.name}", row.relative, row.note
