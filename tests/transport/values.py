"""Tensors that every rank can compute for every other, what reducing them gives, and how results are compared."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

# Prime, so that no block of a power of two bytes looks like another one: a block in the wrong place is seen.
_PERIOD = 65_537

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
HALVES = (torch.float16, torch.bfloat16)


@functools.cache
def _table(dtype: torch.dtype, *, factors: bool) -> Tensor:
    """Two periods of random numbers, so that few values have to be put together from more."""
    return _random(dtype, factors=factors).repeat(2)


def _random(dtype: torch.dtype, *, factors: bool) -> Tensor:
    source = torch.Generator().manual_seed(20_261)
    if dtype == torch.bool:
        return torch.randint(0, 2, (_PERIOD,), generator=source).bool()
    if dtype.is_complex:
        return torch.complex(*torch.randn(2, _PERIOD, generator=source).unbind())
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)  # the whole range: sums and products wrap around, as they do in torch
        return torch.randint(limits.min, limits.max, (_PERIOD,), generator=source, dtype=dtype)
    signs = torch.randint(0, 2, (_PERIOD,), generator=source) * 2 - 1
    uniform = torch.rand(_PERIOD, generator=source, dtype=torch.float64)
    if factors:
        return (signs * (0.6 + uniform)).to(dtype)
    # Four orders of magnitude, so that another order of adding gives other bits.
    return (torch.randn(_PERIOD, generator=source, dtype=torch.float64) * 10 ** (4 * uniform - 2)).to(dtype)


def values(key: Sequence[int], shape: Sequence[int], dtype: torch.dtype, *, factors: bool = False) -> Tensor:
    """Values that depend on the key alone. With `factors`, floats stay near 1, so that products stay finite."""
    table = _table(dtype, factors=factors)
    start = zlib.crc32(repr(tuple(key)).encode()) % _PERIOD
    count = math.prod(shape)
    if start + count > len(table):
        table = table[:_PERIOD].repeat((start + count) // _PERIOD + 1)
    return table[start : start + count].clone().reshape(tuple(shape))


def draw(key: Sequence[int], limit: int) -> int:
    """A number from 0 to `limit` that depends on the key alone."""
    return zlib.crc32(repr(("draw", *key)).encode()) % (limit + 1)


_STEPS = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
OPS = tuple(_STEPS)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that make sense for a dtype."""
    if dtype.is_complex:
        return ("sum",)
    if dtype.is_floating_point:
        return ("sum", "avg", "product", "min", "max")
    return tuple(op for op in OPS if op != "avg")


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduce from left to right in rank order; halves in float32, rounded once at the end."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = _STEPS[op](result, part.to(wide))
    if op == "avg":
        result = result / len(parts)
    return result.to(dtype)


def rounding(parts: Sequence[Tensor], op: str) -> Tensor:
    """How far two right results of a float reduction may be apart where the order is free."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    unit = torch.finfo(dtype).eps * len(parts)
    if op in ("min", "max"):
        return torch.zeros(parts[0].shape, dtype=torch.float64)
    if op == "product":
        return unit * reduced([part.to(wide) for part in parts], op).abs()
    scale = len(parts) if op == "avg" else 1
    tiny = torch.finfo(dtype).tiny  # below the smallest normal number, halves are rounded more coarsely
    return unit * sum(part.to(wide).abs() for part in parts) / scale + tiny


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in its logical order."""
    if tensor.numel() < 2 or not tensor.is_contiguous():  # these few count as contiguous whatever their strides are
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclasses.dataclass
class Report:
    """What one rank has checked."""

    checks: int = 0
    skipped: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)

    def true(self, label: str, condition: object, note: object = "") -> None:
        """Check anything; the note says what is wrong."""
        self.checks += 1
        if not condition:
            self.failures.append(f"{label}: {note}")

    def equal(self, label: str, got: object, expected: object) -> None:
        """Check plain values."""
        self.true(label, got == expected, f"{got!r} instead of {expected!r}")

    def bits(self, label: str, got: Tensor, expected: Tensor) -> None:
        """Check that two tensors are the same to the last bit."""
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            self.true(label, False, f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}")
            return
        self.true(label, torch.equal(bits(got), bits(expected)), _Difference(got, expected))

    def close(self, label: str, got: Tensor, expected: Tensor, bound: Tensor) -> None:
        """Check that two tensors differ by no more than the bound, entry by entry; infinities must agree."""
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            self.true(label, False, f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}")
            return
        wide = torch.complex128 if got.is_complex() else torch.float64
        far = ((got.to(wide) - expected.to(wide)).abs() <= bound).logical_not() & got.ne(expected)
        self.true(label, not bool(far.any()), _Difference(got, expected, far))

    def same_on_all_ranks(self, label: str, tensor: Tensor) -> None:
        """Note a result that has to have the same bits on every rank that notes it."""
        self.digests[label] = hashlib.sha1(bits(tensor).numpy().tobytes(), usedforsecurity=False).hexdigest()


class _Difference:
    """The text of a difference, made only where there is one."""

    def __init__(self, got: Tensor, expected: Tensor, where: Tensor | None = None) -> None:
        self._got, self._expected, self._where = got, expected, where

    def __str__(self) -> str:
        places = (self._got.ne(self._expected) if self._where is None else self._where).nonzero()
        if len(places) == 0:
            return "the bits differ in entries that compare equal (a signed zero)"
        first, last = tuple(places[0].tolist()), tuple(places[-1].tolist())
        return (
            f"{len(places)} of {self._got.numel()} entries differ, from {list(first)} to {list(last)};"
            f" the first is {self._got[first].item()!r} instead of {self._expected[first].item()!r}"
        )


def assert_reports(reports: Sequence[Report], *, at_least: int = 1) -> None:
    """Fail where a rank has found a difference, where ranks hold different bits, or where too little was checked."""
    failures = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report.failures]
    for label in {label for report in reports for label in report.digests}:
        found = {rank: report.digests[label] for rank, report in enumerate(reports) if label in report.digests}
        if len(set(found.values())) > 1:
            failures.append(f"{label}: the ranks hold different bits: {found}")
    shown = "\n".join(failures[:12])
    assert not failures, f"{len(failures)} checks failed, the first:\n{shown}"
    checked = sum(report.checks for report in reports)
    assert checked >= at_least, f"only {checked} checks were made, at least {at_least} were expected"
