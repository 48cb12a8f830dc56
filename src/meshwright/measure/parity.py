"""Differences of two sets of tensors, parameter by parameter, and the report on them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.texts import html_block, html_table, html_text

__all__: list[str] = []

_VERSION = 1
_NOISE_ROUNDINGS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The difference of one tensor from its reference."""

    name: str
    """The parameter's FQN."""
    relative: float
    """Largest absolute difference over the reference's largest absolute entry; inf where they cannot be compared."""
    note: str = ""
    """Where the largest difference stands, or why the two cannot be compared."""
    gap: float = 0.0
    """The largest absolute difference."""
    own: float | None = None
    """The difference over this tensor's own largest entry, where `relative` is to all tensors'; else None."""


def compare_tensors(
    candidate: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None], noisy: Collection[str] = ()
) -> list[TensorDifference]:
    """Compare two named sets of tensors.

    A difference is relative to the largest absolute entry of the reference's tensor. If that entry is below 16 roundings of the
    largest entry of *all* tensors, the difference is relative to the latter. A gradient that is zero in exact arithmetic (the
    bias of an attention key) holds only rounding errors. Whether this one does, only its computation tells (`noise.py`).
    Entries that are not finite have to be the same, and are no scale for others. Integers differ by 1 at least, or not.

    Args:
        candidate: The computed tensors.
        reference: The expected tensors.
        noisy: Names of tensors that hold only rounding errors of a lower precision: relative to *all* tensors, too.

    Returns:
        One difference for each name, in the reference's order, then the names that only the candidate has.

    >>> one, two = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5])}
    >>> compare_tensors(two, one)[0].relative
    0.25
    """
    rounded = [dense for dense in (_dense(t) for t in reference.values() if t is not None) if dense.is_floating_point()]
    overall = max(map(_largest, rounded), default=0.0)
    differences = [
        _compare(name, candidate[name], expected, overall, is_noisy=name in noisy)
        if name in candidate
        else TensorDifference(name=name, relative=math.inf, note="missing")
        for name, expected in reference.items()
    ]
    extra = [name for name in candidate if name not in reference]
    return differences + [TensorDifference(name=name, relative=math.inf, note="not in the reference") for name in extra]


def relative_difference(candidate: float, reference: float) -> float:
    """Return the relative difference of two numbers; 0 for two equal ones, NaN and infinities included."""
    if candidate == reference or (math.isnan(candidate) and math.isnan(reference)):
        return 0.0
    if not (math.isfinite(candidate) and math.isfinite(reference)):
        return math.inf
    return abs(candidate - reference) / abs(reference) if reference else math.inf


def _largest(dense: Tensor) -> float:
    """Return the largest finite absolute value: beside the infinities of a mask nothing else would count."""
    largest = float(dense.abs().max()) if dense.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = dense[dense.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _compare(
    name: str, candidate: Tensor | None, reference: Tensor | None, overall: float, *, is_noisy: bool
) -> TensorDifference:
    if candidate is None or reference is None:
        if candidate is reference:
            return TensorDifference(name=name, relative=0.0)
        missing = "None, the reference has a tensor" if candidate is None else "a tensor, the reference has None"
        return TensorDifference(name=name, relative=math.inf, note=missing)
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        note = f"{_kind(candidate)} instead of {_kind(reference)}"
        return TensorDifference(name=name, relative=math.inf, note=note)
    if reference.numel() == 0:
        return TensorDifference(name=name, relative=0.0)
    got, expected = _dense(candidate), _dense(reference)
    if torch.equal(got, expected):
        return TensorDifference(name=name, relative=0.0)
    dtype = expected.dtype
    if not dtype.is_floating_point:
        return _compare_integers(name, got, expected)
    got, expected = got.double(), expected.double()
    gap = (got - expected).abs()
    if not gap.isfinite().all():
        same = (got == expected) | (got.isnan() & expected.isnan())
        gap = torch.where(same, 0.0, torch.where(gap.isnan(), math.inf, gap))
    worst = int(gap.argmax())
    size = float(gap.flatten()[worst])
    if size == 0.0:
        return TensorDifference(name=name, relative=0.0)
    note = (
        f"{float(got.flatten()[worst]):.17g} instead of {float(expected.flatten()[worst]):.17g} at {_place(gap, worst)}"
    )
    own = _ratio(size, _largest(expected))
    if is_noisy or size <= _NOISE_ROUNDINGS * torch.finfo(dtype).eps * overall:
        return TensorDifference(name=name, relative=_ratio(size, overall), note=note, gap=size, own=own)
    return TensorDifference(name=name, relative=own, note=note, gap=size)


def _compare_integers(name: str, got: Tensor, expected: Tensor) -> TensorDifference:
    gap = torch.where(got == expected, 0.0, (got.double() - expected.double()).abs().clamp(min=1.0))
    worst = int(gap.argmax())
    note = f"{got.flatten()[worst].item()} instead of {expected.flatten()[worst].item()} at {_place(gap, worst)}"
    size = float(gap.flatten()[worst])
    return TensorDifference(
        name=name, relative=max(1.0, _ratio(size, _largest(expected.double()))), note=note, gap=size
    )


def _place(tensor: Tensor, flat: int) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def _ratio(size: float, scale: float) -> float:
    return size / scale if scale > 0.0 and math.isfinite(size) else math.inf


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterParity:
    """Distance of one parameter from one plain process, over all verified steps."""

    name: str
    """The parameter's FQN."""
    gradient: float
    """Largest relative difference of its gradient before the optimizer."""
    value: float
    """Largest relative difference of its value after the update."""
    note: str = ""
    """The first step and place where it is outside the bound; empty where it never is."""
    gradient_bound: float | None = None
    """The bound of its gradient, where the model's own arithmetic resolves less; None: the report's."""
    value_bound: float | None = None
    """The same for its value."""

    def is_within(self, bound: float) -> bool:
        """Tell whether both are within their bounds, `bound` being the report's."""
        return self.gradient <= (self.gradient_bound or bound) and self.value <= (self.value_bound or bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferParity:
    """Distance of one buffer, such as running statistics, from one plain process, over all verified steps."""

    name: str
    """The buffer's FQN."""
    value: float
    """Largest relative difference of its value after a step."""
    note: str = ""
    """The first step and place where it is outside the bound; empty where it never is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Result of `verify_plan`: numbers for each parameter, and whether all of them are within the bound."""

    plan: str
    """The plan, on one line."""
    num_steps: int
    """Optimizer steps compared [count]."""
    dtype: str
    """What both sides computed in."""
    bound: float
    """The largest relative difference that counts as equal."""
    equal: bool
    """Whether every number below is within the bound and all ranks agree bit by bit."""
    losses: tuple[tuple[float, float], ...]
    """(plan, one process) for each step."""
    loss_difference: float
    """Largest relative difference of the losses."""
    grad_norm_difference: float
    """Largest relative difference of the gradients' global norm."""
    parameters: tuple[ParameterParity, ...]
    """One row for each parameter, in the model's order."""
    unequal_ranks: tuple[int, ...] = ()
    """Ranks whose parameters, gradients or losses are not bit-identical to rank 0's."""
    first_unequal: str | None = None
    """In what such a rank is not, at first: "step 0, value of NAME"."""
    first_parameter: str | None = None
    """FQN of the parameter that is outside the bound first: in the earliest step, a gradient before a value."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: batch statistics, dropout, precision."""
    first_module: str | None = None
    """Where the plan is not equal: FQN of the first module, in the order in which they end, whose output differs in the first
    step; "" is the model itself. None where none does, or the plan's own copies of the modules were not seen."""
    first_module_difference: float | None = None
    """By how much: relative difference of the sum of its output's squares."""

    buffers: tuple[BufferParity, ...] = ()
    """One row for each buffer, in the model's order."""
    computes_in: str | None = None
    """The lower precision in which the model computes in places, whatever its weights are; None: there is none."""
    loss_bound: float | None = None
    """The bound of the losses, where the model's own arithmetic resolves less; None: `bound`."""
    grad_norm_bound: float | None = None
    """The same for the gradient norm."""

    @property
    def first_difference(self) -> ParameterParity | None:
        """The parameter that is outside the bound first: in the earliest step, then in the model's order; or None."""
        outside = [row for row in self.parameters if not row.is_within(self.bound)]
        named = [row for row in outside if row.name == self.first_parameter]
        return next(iter(named or outside), None)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it, the parameters that differ most first."""
        rows = sorted(self.parameters, key=lambda row: -max(row.gradient, row.value))
        cells = [(row.name, f"{row.gradient:.1e}", f"{row.value:.1e}", row.note) for row in rows]
        verdict, _, rest = self.to_text(max_rows=0).partition("\n")
        return html_block(verdict, html_table(["parameter", "gradient", "value", ""], cells), html_text(rest.strip()))

    def to_json(self) -> str:
        """Return the report as JSON; infinities are written as the text "inf"."""
        return json.dumps({"version": _VERSION, **_write_infinities(dataclasses.asdict(self))}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ParityReport:
        """Read a report that `to_json` wrote.

        Raises:
            ConfigError: It is not such a report, or of another version.
        """
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != _VERSION:
                raise ConfigError(f"a parity report of version {version}; this release reads version {_VERSION}")
            fields["parameters"] = tuple(ParameterParity(**_read_infinities(row)) for row in fields["parameters"])
            fields["buffers"] = tuple(BufferParity(**_read_infinities(row)) for row in fields.get("buffers", ()))
            fields["losses"] = tuple((float(a), float(b)) for a, b in fields["losses"])
            fields["unequal_ranks"], fields["notes"] = tuple(fields["unequal_ranks"]), tuple(fields["notes"])
            return cls(**_read_infinities(fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a parity report: {error}") from error

    def to_text(self, max_rows: int = 20) -> str:
        """Return a table for people.

        Args:
            max_rows: Parameters to list, worst first; the others are counted [count].
        """
        verdict = "equal to one process" if self.equal else "NOT equal to one process"
        lines = [
            f"{self.plan}: {verdict} ({self.num_steps} steps, {self.dtype}, {self._bounds_text()})",
            "",
            f"{'step':>4}  {'loss, plan':>24}  {'loss, one process':>24}",
            *(f"{i:>4}  {a:>24.17g}  {b:>24.17g}" for i, (a, b) in enumerate(self.losses)),
            "",
            f"largest relative difference: loss {self.loss_difference:.1e}, gradient norm {self.grad_norm_difference:.1e}",
            "",
        ]
        rows = sorted(self.parameters, key=lambda row: -max(row.gradient, row.value))[:max_rows]
        width = max([len("parameter"), *(len(row.name) for row in rows)])
        lines.append(f"{'parameter':<{width}}  {'gradient':>8}  {'value':>8}")
        lines += [f"{r.name:<{width}}  {r.gradient:>8.1e}  {r.value:>8.1e}  {r.note}".rstrip() for r in rows]
        if len(self.parameters) > len(rows):
            lines.append(f"... and {len(self.parameters) - len(rows)} parameters that differ no more than these")
        lines += self._buffer_lines()
        for kind, difference, bound in (
            ("loss", self.loss_difference, self.loss_bound),
            ("gradient norm", self.grad_norm_difference, self.grad_norm_bound),
        ):
            if not difference <= (bound or self.bound):
                lines += ["", f"outside the bound: {kind}, {difference:.1e}"]
        first = self.first_difference
        if first is not None:
            lines += ["", f"first parameter outside the bound: {first.name} ({first.note})"]
        if self.first_module is not None and self.first_module_difference is not None:
            name = self.first_module or "the model itself"
            lines += ["", f"first module whose output differs: {name} ({self.first_module_difference:.1e})"]
        elif not self.equal:
            lines += ["", "no module's output was seen to differ in the first step"]
        if self.unequal_ranks:
            where = f", at first in {self.first_unequal}" if self.first_unequal else ""
            lines += ["", f"ranks that are not bit-identical to rank 0: {list(self.unequal_ranks)}{where}"]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)

    def _bounds_text(self) -> str:
        found = [self.loss_bound, self.grad_norm_bound]
        found += [bound for row in self.parameters for bound in (row.gradient_bound, row.value_bound)]
        loosest = max((bound for bound in found if bound is not None), default=self.bound)
        looser = f", up to {loosest:.0e} where {self.computes_in} bounds it" if loosest > self.bound else ""
        return f"bound {self.bound:.0e} relative{looser}"

    def _buffer_lines(self) -> list[str]:
        if not self.buffers:
            return []
        worst = max(self.buffers, key=lambda row: row.value)
        lines = [
            "",
            f"buffers: {len(self.buffers)} compared, largest relative difference {worst.value:.1e} ({worst.name})",
        ]
        outside = [row for row in self.buffers if row.note]
        return [*lines, *(f"outside the bound: buffer {row.name}, {row.value:.1e} ({row.note})" for row in outside[:3])]


def _write_infinities(value: Any) -> Any:
    # JSON has no infinity and no NaN; Python writes ones that other readers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _write_infinities(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_write_infinities(item) for item in value]
    return value


def _read_infinities(fields: dict[str, Any]) -> dict[str, Any]:
    numbers = ("gradient", "value", "bound", "loss_difference", "grad_norm_difference", "first_module_difference")
    return {key: float(item) if key in numbers and item is not None else item for key, item in fields.items()}
