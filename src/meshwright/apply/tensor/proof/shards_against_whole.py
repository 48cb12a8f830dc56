"""Comparison of results on shards with those of the whole: equal to rounding, or a DisprovedError that names the difference."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.tensor.cutting import Cutting, find_tensor
from meshwright.apply.tensor.proof.effects import Left
from meshwright.apply.tensor.slices import Slices
from meshwright.errors import MeshwrightError
from meshwright.layout import ShardLayout, check_coverage
from meshwright.nn.shards import matching_parts, take_shard

__all__: list[str] = []

_BLOCK = 2**17
"""Entries of which a difference is made at a time: memory that a process keeps, which no page fault has to bring [count]."""

_LEAST = 1e-30
"""The smallest scale of a difference."""

TOLERANCE = 1e-10
"""Largest difference, relative to the tensor's largest entry, that float64 is given; a wrong cut is off by far more."""


NEARLY = 1e-7
"""Largest difference, relative as above, that a wrong cut does not make: steps behind it have multiplied rounding."""


class Disproof(enum.Enum):
    """In what shards and the whole part; the search decides by it which change may help."""

    UNFIT_SIZES = "torch refused an operation on shards"
    RAISED = "code raised something else on shards"
    GRADIENT_VALUES = "a gradient has other values"
    GRADIENT = "a gradient has another shape, or is a term in one call and the whole in another"
    RESULT_VALUES = "a result has other values"
    ROUNDING = "a result or a gradient is nearly the same: no other cut is nearer"
    OTHER = "anything else"

    @property
    def is_raised(self) -> bool:
        """Whether the shards did not come to their end."""
        return self in (Disproof.UNFIT_SIZES, Disproof.RAISED)

    @property
    def is_gradient(self) -> bool:
        """Whether the results were right, and a gradient was not."""
        return self in (Disproof.GRADIENT_VALUES, Disproof.GRADIENT)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Why a region was disproved. Two are equal where the same was found, to the rounding of the numbers in the text."""

    kind: Disproof
    text: str


class DisprovedError(MeshwrightError):
    """The shards do not give what the whole gives; the message says where they part."""

    def __init__(self, message: str, kind: Disproof = Disproof.OTHER) -> None:
        super().__init__(message)
        self.difference = Difference(kind, message)


def in_words(error: BaseException) -> str:
    r"""Return what code of a trial raised, as a part of a sentence: the first line alone, since the rest is a traceback's.

    >>> in_words(RuntimeError("The size of tensor a (3) must match\n(more)"))
    "its code raised RuntimeError, 'The size of tensor a (3) must match'"
    >>> in_words(KeyError())
    'its code raised KeyError'
    """
    text = (str(error).splitlines() or [""])[0]
    return f"its code raised {type(error).__name__}" + (f", '{text}'" if text else "")


def add_up(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the ranks' gradients; None where no rank has one."""
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) if there else None


def are_same(gradients: Sequence[Tensor | None]) -> bool:
    """Tell whether the ranks' gradients are equal to the bit."""
    there = [gradient for gradient in gradients if gradient is not None]
    return len(there) in (0, len(gradients)) and all(torch.equal(gradient, there[0]) for gradient in there)


def is_equal(mine: Tensor | None, whole: Tensor | None, least: float = _LEAST) -> bool:
    """Tell whether two tensors are equal to rounding; only zeros equal zeros. `least` is the smallest scale."""
    if mine is None or whole is None:
        there = mine if whole is None else whole
        return there is None or not bool(there.any())
    if mine.shape != whole.shape or mine.dtype != whole.dtype:
        return False
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(mine, whole)
    # Infinite entries are nothing but equal, and so is what stands beside them: no difference exceeds an infinite scale.
    return furthest(mine, whole) <= TOLERANCE * max(largest(whole), least) < math.inf or torch.equal(mine, whole)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute entry, NaN where there is one; without a copy of the tensor."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return torch.linalg.vector_norm(tensor, ord=float("inf")).item()
    low, high = torch.aminmax(tensor)  # eight times as fast as a norm
    return max(-low.item(), high.item())


def furthest(mine: Tensor, whole: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape, NaN where there is one."""
    if mine.numel() <= _BLOCK or not mine.dim():
        return largest(mine - whole)
    num_rows = max(1, _BLOCK * mine.shape[0] // mine.numel())
    found = 0.0
    for own, other in zip(mine.split(num_rows), whole.split(num_rows), strict=True):
        difference = largest(own - other)
        if math.isnan(difference):
            return difference
        found = max(found, difference)
    return found


def check_equal(mine: Tensor | None, whole: Tensor | None, what: str, least: float = _LEAST) -> None:
    """Raise DisprovedError where two tensors are not equal to rounding; see `is_equal`."""
    if not is_equal(mine, whole, least):
        kind = _kind_of(mine, whole, least, shape=Disproof.OTHER, values=Disproof.RESULT_VALUES)
        raise DisprovedError(_difference(mine, whole, what), kind)


def check_gradient(mine: Tensor | None, whole: Tensor | None, of: str, least: float) -> None:
    """Raise DisprovedError where two gradients are not equal to rounding; see `is_equal`."""
    if not is_equal(mine, whole, least):
        kind = _kind_of(mine, whole, least, shape=Disproof.GRADIENT, values=Disproof.GRADIENT_VALUES)
        raise DisprovedError(_difference(mine, whole, f"the gradient of {of}"), kind)


def _kind_of(mine: Tensor | None, whole: Tensor | None, least: float, *, shape: Disproof, values: Disproof) -> Disproof:
    """Return what tensors that are not equal differ in; `shape` and `values` say it of these two."""
    if mine is None or whole is None or mine.shape != whole.shape:
        return shape
    is_real = mine.dtype == whole.dtype and (whole.is_floating_point() or whole.is_complex())
    is_near = is_real and furthest(mine, whole) <= NEARLY * max(largest(whole), least) < math.inf
    return Disproof.ROUNDING if is_near else values


def check_shards(
    shards: Sequence[Tensor | None],
    layouts: Sequence[ShardLayout],
    whole: Tensor | None,
    what: str,
    least: float,
    *,
    check: Callable[[Tensor | None, Tensor | None, str, float], None],
) -> None:
    """Raise what `check` raises where the ranks' shards are not the whole tensor's parts; None stands for zeros beside others.

    Args:
        shards: One a rank.
        layouts: The parts that they have to be.
        whole: The whole tensor.
        what: Its name.
        least: The scale of a difference, at least: the size of the whole tensor's largest entry, or more.
        check: `check_equal` or `check_gradient`.
    """
    check_coverage(layouts)
    for shard, layout in zip(shards, layouts, strict=True):
        if shard is None and not all(other is None for other in shards):
            shard = torch.zeros(layout.local_shape, dtype=torch.float64)
        if whole is not None and tuple(whole.shape) != layout.shape:  # exchanged for a tensor of another size
            raise DisprovedError(
                f"{what} is of shape {list(whole.shape)} of the whole, and {list(layout.shape)} is cut"
            )
        if shard is None or whole is None or layout.flat is not None or tuple(shard.shape) != layout.local_shape:
            check(shard, None if whole is None else take_shard(whole, layout), what, least)
            continue
        # Part by part, in the memory where it lies: to put shards together would take theirs twice more.
        for part, own in matching_parts(whole, shard, layout.dim, layout.ranges):
            check(own, part, what, least)


def _difference(mine: Tensor | None, whole: Tensor | None, what: str) -> str:
    if mine is None or whole is None or mine.shape != whole.shape:
        return f"{what} is {_shape(mine)} on shards, {_shape(whole)} of the whole"
    wide = torch.complex128 if whole.is_complex() or mine.is_complex() else torch.float64
    difference = (mine.to(wide) - whole.to(wide)).abs().max().item()
    return f"{what} differs by {difference:.1e} of {whole.to(wide).abs().max().item():.1e}"


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"of shape {list(tensor.shape)}"


def check_left(own: Sequence[Left], whole: Left, cutting: Cutting) -> None:
    """Raise DisprovedError, with its name, where forwards have left another parameter, buffer, argument or attribute."""
    cuts, by_id = cutting.layout.cuts, cutting.layouts_by_id()
    for name in sorted(whole.changed.union(*(left.changed for left in own))):
        found = [_value(left, name) for left in own]
        layouts = by_id.get(id(find_tensor(cutting.module, name))) if name in cuts else None
        if layouts is not None:
            expected = _value(whole, name)
            is_real = expected is not None and (expected.is_floating_point() or expected.is_complex())
            size = largest(expected) if expected is not None and is_real else 0.0
            check_shards(found, layouts, expected, f"what is left in {name}", max(size, _LEAST), check=check_equal)
            continue
        for tensor in found:
            check_equal(tensor, _value(whole, name), f"what is left in {name}")
    for path in dict.fromkeys(path for left in (whole, *own) for path in left.attributes):
        for left in own:
            _check_attribute(left.attributes.get(path), whole.attributes.get(path), path)


def _value(left: Left, name: str) -> Tensor | None:
    tensor = left.tensors.get(name)
    return None if tensor is None else tensor.detach()


def _check_attribute(mine: Any, whole: Any, path: str) -> None:
    if isinstance(mine, Slices):
        raise DisprovedError(f"what is left in '{path}' is in slices")
    if isinstance(mine, Tensor) and isinstance(whole, Tensor):
        check_equal(mine.detach(), whole.detach(), f"what is left in '{path}'")
    elif isinstance(mine, float) and isinstance(whole, float):
        check_equal(torch.tensor(mine).double(), torch.tensor(whole).double(), f"what is left in '{path}'")
    elif type(mine) is not type(whole) or mine != whole:
        raise DisprovedError(f"what is left in '{path}' is {_told(mine)} on shards, {_told(whole)} of the whole")


def _told(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
