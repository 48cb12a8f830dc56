"""Relation of a batch's loss to the losses of its parts: their sum, or their mean weighted by samples or by labels.

A loop of transformers gives a number and no word on what it counts. It is found on the first batch, by the loss of the whole and
of two parts, in evaluation mode and without gradients, and again in training mode without dropout: a loss may have terms that it
has only there. A loss that fits nothing compares samples with each other, and is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from meshwright.apply.state.undisturbed import GeneratorStates, undisturbed
from meshwright.apply.tensor.search.operations import WithoutDropout
from meshwright.describe.batches import split_samples
from meshwright.errors import ApplyError
from meshwright.trees import map_tensors

__all__: list[str] = []

Kind = Literal["sum", "samples", "labels"]
_KINDS: dict[Kind, str] = {
    "sum": "their sum",
    "samples": "their mean weighted by samples",
    "labels": "their mean weighted by labels",
}
_FIX = (
    "a loss that compares samples, or balances experts over a batch, needs it whole: a plan with batch=whole, or dp=1"
)
IGNORED = -100
_TOLERANCES = {torch.float64: (2e-7, 2e-6), torch.float32: (4e-6, 1e-4)}
"""By how much equal losses may differ, by their dtype: at least, and where the order of samples alone makes more [fraction]."""
_ROUNDINGS = 32.0
"""How many times the difference that another order of the samples makes is tolerated [ratio]."""
_COARSE = 3e-2
_CLEAR = 8.0
"""What fits this many times better than the next is the answer [ratio]."""


def find_kind(
    loss_of: Callable[[Any], torch.Tensor], batch: Any, num_samples: int, *, expected: Kind, shifts: bool
) -> Kind | None:
    """Return what the loss of a batch is of its parts' losses; None where this batch cannot tell, having one sample.

    Args:
        loss_of: Batch -> its loss, a scalar without graph.
        batch: A batch of the loop; a mapping.
        num_samples: Its samples [count].
        expected: The answer where several fit.
        shifts: Whether labels count from the second position on.

    Raises:
        ApplyError: The losses of parts do not give the loss of the whole.
    """
    if num_samples < 2:
        return None
    tried = _PartsOfLoss(loss_of, with_ignored(batch, shifts=shifts), num_samples, shifts=shifts)
    fitting: list[tuple[float, Kind]] = sorted(
        (error, kind) for kind, error in tried.errors.items() if error <= tried.bound
    )
    if not fitting:
        raise ApplyError(
            f"{tried.numbers} (rule: their sum, or their mean weighted by samples or labels, is the loss)", fix=_FIX
        )
    if len(fitting) == 1 or fitting[1][0] > _CLEAR * max(fitting[0][0], 1e-15):
        return fitting[0][1]
    return expected if any(kind == expected for _, kind in fitting) else fitting[0][1]


def refuse_other_kind(
    loss_of: Callable[[Any], torch.Tensor],
    batch: Any,
    num_samples: int,
    *,
    kind: Kind,
    shifts: bool,
    model: nn.Module,
    device: torch.device,
    drops: bool,
) -> None:
    """Refuse a batch whose loss does not follow from its parts' losses as that of the first batch did.

    Args:
        loss_of: As for `find_kind`.
        batch: A later batch; a mapping.
        num_samples: Its samples [count].
        kind: What was found.
        shifts: As for `find_kind`.
        model: The model; it is left as it was. It is tried in training mode, unless it draws random numbers there.
        device: Its device.
        drops: Whether to let dropout draw.

    Raises:
        ApplyError: The parts do not give the loss of the whole.
    """
    if num_samples < 2:
        return
    with undisturbed(model, device), contextlib.nullcontext() if drops else WithoutDropout():
        for trains in (True, False):
            model.train(trains)
            before = GeneratorStates(device)
            tried = _PartsOfLoss(loss_of, batch, num_samples, shifts=shifts)
            if not before.have_moved():
                break
    if tried.errors.get(kind, 0.0) > tried.bound:
        raise ApplyError(
            f"{tried.numbers}: it is not {_KINDS[kind]}, as it was for the first batch (some labels do not count, or a term of "
            "the whole batch has begun)",
            fix=f"a loss normalised by num_items_in_batch (compute_loss_func=). {_FIX[0].upper()}{_FIX[1:]}",
        )


class _PartsOfLoss:
    """The losses of a batch and of two parts of it.

    Args:
        loss_of: As for `find_kind`.
        batch: The batch.
        num_samples: Its samples, two or more [count].
        shifts: As for `find_kind`.
    """

    def __init__(self, loss_of: Callable[[Any], torch.Tensor], batch: Any, num_samples: int, *, shifts: bool) -> None:
        first = _first_part(batch, num_samples, shifts=shifts)
        parts = split_samples(batch, [first, num_samples - first])
        whole = loss_of(batch)
        wanted = whole.double().item()
        losses = [loss_of(part).double().item() for part in parts]
        sizes: dict[Kind, list[float]] = {"sum": [1.0, 1.0], "samples": [float(first), float(num_samples - first)]}
        labels = [count_labels(part, shifts=shifts) for part in parts]
        if all(labels):
            sizes["labels"] = [float(count) for count in labels]
        scale = max(abs(wanted), *map(abs, losses), 1e-30)
        self.errors: dict[Kind, float] = {}
        """For each kind, how far the parts are from the whole [fraction]."""
        for kind, weights in sizes.items():
            total = 1.0 if kind == "sum" else sum(weights)
            found = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / total
            error = abs(found - wanted) / scale if math.isfinite(wanted) else 0.0  # told by the step itself
            self.errors[kind] = error if math.isfinite(error) else math.inf
        self.numbers = (
            f"the loss of a batch is {wanted:.9g}, and those of its parts, of {first} and {num_samples - first} samples, are "
            f"{losses[0]:.9g} and {losses[1]:.9g}"
        )
        least, most = _TOLERANCES.get(whole.dtype, (_COARSE, _COARSE))
        if least < most:
            turned = loss_of(map_tensors(batch, lambda t: t.flip(0) if t.dim() else t)).double().item()
            least = min(max(least, _ROUNDINGS * abs(turned - wanted) / scale), most)
        self.bound = least
        """How far they may be [fraction]."""


def tells_apart(batch: Any, num_samples: int, *, shifts: bool) -> bool:
    """Tell whether `find_kind` knows means by samples from means by labels with this batch: their numbers differ in its parts."""
    if num_samples < 2:
        return False
    batch = with_ignored(batch, shifts=shifts)
    return _are_apart(batch, num_samples, _first_part(batch, num_samples, shifts=shifts), shifts=shifts)


def _first_part(batch: Any, num_samples: int, *, shifts: bool) -> int:
    """Return the samples of the first part: the fewest with which both have labels, not as many for each sample."""
    firsts = range(1, num_samples)
    apart = (first for first in firsts if _are_apart(batch, num_samples, first, shifts=shifts))
    have_labels = (first for first in firsts if all(_counts(batch, num_samples, first, shifts=shifts)))
    return next(apart, next(have_labels, 1))


def _counts(batch: Any, num_samples: int, first: int, *, shifts: bool) -> list[int]:
    labels = labels_of(batch)
    if labels is None or len(labels) != num_samples:
        return [0, 0]
    return [count_labels({"labels": part}, shifts=shifts) for part in (labels[:first], labels[first:])]


def _are_apart(batch: Any, num_samples: int, first: int, *, shifts: bool) -> bool:
    one, other = _counts(batch, num_samples, first, shifts=shifts)
    return one > 0 and other > 0 and one * (num_samples - first) != other * first


def find_kind_in_training(
    loss_of: Callable[[Any], torch.Tensor],
    batch: Any,
    num_samples: int,
    *,
    kind: Kind | None,
    shifts: bool,
    model: nn.Module,
    device: torch.device,
    drops: bool,
) -> Kind | None:
    """Return the answer of `find_kind` in training mode, or the given one where the model draws random numbers there.

    Args:
        loss_of: As there.
        batch: As there.
        num_samples: As there [count].
        kind: The answer in evaluation mode.
        shifts: As there.
        model: The model, in training mode; it is left as it was.
        device: Its device.
        drops: Whether to let dropout draw.

    Raises:
        ApplyError: As there.
    """
    with undisturbed(model, device), contextlib.nullcontext() if drops else WithoutDropout():
        before = GeneratorStates(device)
        try:
            found = find_kind(loss_of, batch, num_samples, expected=kind or "samples", shifts=shifts)
        except ApplyError:
            if before.have_moved():
                return kind
            raise
        return kind if before.have_moved() else found


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return the labels of a batch: whole numbers, of which -100 is ignored; None where there are none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_class = isinstance(labels, torch.Tensor) and labels.dim() > 0 and not labels.is_floating_point()
    return labels if is_class else None


def count_labels(batch: Any, *, shifts: bool) -> int:
    """Return the labels of a batch that count; 0 where there are none."""
    labels = labels_of(batch)
    if labels is None:
        return 0
    return int((labels[..., 1:] if shifts and labels.dim() > 1 else labels).ne(IGNORED).sum().item())


def with_ignored(batch: Any, *, shifts: bool) -> Any:
    """Return the batch with some labels of the first sample ignored, where rows have several: samples and labels then differ."""
    labels = labels_of(batch)
    if labels is None or labels.dim() < 2 or labels.shape[1] < 4 + shifts:
        return batch
    changed = labels.clone()
    changed[0, labels.shape[1] // 2 :] = IGNORED
    copied = dict(batch)
    copied["labels"] = changed
    return copied
