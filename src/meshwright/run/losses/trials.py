"""Trial forwards of the first batch, its parts, and copies with ignored labels, and their evidence about the loss on one rank.

A mean over n of N items can be computed from parts: sum of n x loss / N. Trials find which items it counts; some labels are set
to the ignored value, so that counts differ between parts. A model that draws random numbers or keeps batch statistics in training
is tried in eval mode.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.describe.batches import BatchSplitter, split_samples
from meshwright.run.losses.proofs import TriedLoss, try_all
from meshwright.run.losses.trial_forward import DRAWS, RAISED, TrialForward, TrialOutcome
from meshwright.run.losses.trial_parts import ROUNDINGS, gap_of, turn
from meshwright.run.losses.trial_writes import find_dependent
from meshwright.run.losses.weights import IGNORED_LABEL, Counted, Path, is_decoded, label_paths, replace_at, tensor_at
from meshwright.trees import map_tensors

__all__: list[str] = []

NOT_FINITE = "it is"
"""How the obstacle of a trial begins whose loss is no finite number."""
NUM_PARTS = 3
"""Parts that the first batch is tried in [count]."""
_TOLERANCES = {torch.float64: (2e-7, 2e-6), torch.float32: (4e-6, 1e-4)}
"""By how much equal losses may differ, by their dtype: at least, and where the order of samples alone makes more [fraction]."""
_LOW_TOLERANCE = (1e-2, 2e-2)
_SAME = 1e-9
"""Losses that differ by less are the same whatever was drawn [fraction]."""
_LOW_PARAMETERS = 5e-3
"""For a model in less than float32, or one whose matrix products are rounded to TF32 [fraction]."""


@dataclasses.dataclass(kw_only=True)
class Evidence:
    """Findings of one rank; plain values, since ranks exchange them."""

    obstacle: str | None = None
    has_whole: bool = False
    """Whether parts of the share alone have an obstacle, and the share has a loss."""
    num_samples: int = 0
    """Samples that this rank has for trials; they take one twice [count]."""
    is_zero: bool = False
    """Whether the losses of the share and of its parts are 0, of which all means are alike."""
    is_sum: bool = False
    """Whether loss_fn returned a Loss."""
    is_apart: bool = False
    """Whether the sums and weights of such a Loss over parts do not give the whole's, though the model does not branch."""
    tolerance: float = 0.0
    gaps: list[tuple[Counted, float, list[float | None]]] = dataclasses.field(default_factory=list)
    """For each thing that the mean may count: how far the parts are from the whole, relatively, and so with ignored labels."""
    masked: list[tuple[Path, int, float, bool]] = dataclasses.field(default_factory=list)
    """Where labels were ignored for that, which value is, how many of a sample are in the data, and whether it could be tried."""
    numbers: str = ""
    """The losses, for people."""
    size: float = 0.0
    """The largest of them."""
    is_total: bool = False
    """Whether the loss of the whole is the sum of the parts' losses."""
    has_class_weights: bool = False
    written: str | None = None
    """A parameter that the forward sets by its batch."""
    branches: bool = False
    """Whether the model's forward reads values of its batch in Python, so that another batch may take another way."""
    own_generator: str = ""
    """The place of a generator of the model's own that draws in its forward."""
    apart: str = ""
    """Why gradients are not what parts give, though the loss is."""
    kept: str = ""
    """Why later batches are not, since code keeps something of those before."""
    tries_keeping: bool = False
    """Whether what a step keeps for the next was tried, in a step's mode; a model that draws is in eval mode."""
    untried: str = ""
    """Why gradients could not be compared."""
    culprit: str = "loss"
    """What does not come back from parts: the "loss", the "model" before it, or the model's "branches"."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """What is tried beside the loss.

    Args:
        are_wanted: Whether anything is.
        changes: Gives what loss_fn has changed on trial, for people.
    """

    are_wanted: bool = False
    changes: Callable[[], Iterable[str]] = tuple


def examine(
    share: Any,
    module: nn.Module,
    splitter: BatchSplitter,
    *,
    splits_by_row: bool,
    counts: Sequence[int] = (),
    proofs: Proofs | None = None,
    casts: torch.dtype | None = None,
    is_wide: bool = False,
    ignores_labels: bool = True,
    weigh: Callable[[Any], float] | None = None,
) -> Generator[list[TrialForward], list[TrialOutcome], Evidence]:
    """Yield trials, receive their outcomes, and return the evidence.

    Args:
        share: At least two samples.
        module: The model, for the dtypes that it computes in.
        splitter: Counts and cuts batches.
        splits_by_row: Whether dim 0 is the sample in every tensor.
        counts: Samples of the parts to try; none: even ones [count].
        proofs: What is tried beside the loss.
        casts: What autocast makes of a step; trials run without it where the code can.
        is_wide: Whether they run in float32, where the model or the batch has fewer digits.
        ignores_labels: Whether copies with ignored labels are tried, so that what is counted shows.
        weigh: Gives what a part's mean counts, where that is known, and nothing else is tried; None: it is to be found.
    """
    parts = split_samples(share, counts) if counts else splitter.cut(share, min(NUM_PARTS, splitter.count(share)))
    first = TrialForward(share, False, is_wide=is_wide)
    whole, like, end = yield from _try_whole(first, parts, casts)
    if end is not None:
        return end
    num_samples = splitter.count(share)
    turned = (yield [dataclasses.replace(like, batch=map_tensors(share, turn))])[0].value if splits_by_row else math.nan
    noise = gap_of(whole.value, [turned], [1.0])
    if len(parts) < 2:
        return Evidence(obstacle="split= does not cut the first batch")
    outcomes = yield [dataclasses.replace(like, batch=part) for part in parts]
    obstacle = next((outcome.obstacle for outcome in outcomes if outcome.obstacle is not None), None)
    if obstacle is not None:
        return Evidence(obstacle=obstacle, has_whole=True)
    counts = [splitter.count(part) for part in parts]
    found = Evidence(
        is_sum=whole.weight is not None,
        is_zero=not any(outcome.value for outcome in (whole, *outcomes)),
        tolerance=_tolerance(module, whole, noise),
        numbers=_describe(whole, outcomes, counts),
        size=max(abs(outcome.value) for outcome in (whole, *outcomes)),
        is_total=gap_of(whole.value, [o.value for o in outcomes], [1.0] * len(parts), divide=False) < _LOW_PARAMETERS,
        has_class_weights=whole.has_class_weights,
        branches=whole.branches,
        own_generator=whole.own_generator,
        tries_keeping=proofs is not None and proofs.are_wanted and not like.evaluates and like.ahead is None,
    )
    tried = TriedLoss(like, whole, parts, counts, outcomes, found.tolerance)
    prove = functools.partial(_prove, found, proofs or Proofs(), tried)
    if found.is_sum:
        return (yield from _as_summed(found, tried, prove if weigh is None else None))
    if weigh is not None:
        of_rows = dataclasses.replace(like, counts=tuple(counts))
        return (yield from _as_weighed(found, of_rows, whole, outcomes, [weigh(part) for part in parts]))
    paths = label_paths(share, num_samples) if splits_by_row else []
    ignored = whole.ignored or (IGNORED_LABEL,)
    candidates = _candidates(share, paths, ignored)
    variants: list[list[float | None]] = []
    for path, value in ((path, value) for path in (paths if ignores_labels else ()) for value in ignored):
        labels = tensor_at(share, path)
        if labels is None:
            continue
        # A GPU ends the process where a decoder looks up what no table has.
        is_known = value in whole.ignored and (value >= 0 or not is_decoded(path))
        is_safe = labels.device.type == "cpu" or is_known or bool((labels == value).any())
        masked = _mask(share, path, labels, value, counts) if is_safe else None
        gaps: list[float | None] = [None] * len(candidates)
        if masked is not None:
            pieces = split_samples(masked, counts)
            results = yield [dataclasses.replace(like, batch=piece) for piece in (masked, *pieces)]
            if not any(result.obstacle for result in results) and math.isfinite(results[0].value):
                gaps = [_fit(results[0], results[1:], pieces, counted, splitter) for counted in candidates]
        variants.append(gaps)
        found.masked.append((path, value, float((labels == value).sum()) / num_samples, is_safe))
    found.gaps = [
        (counted, _fit(whole, outcomes, parts, counted, splitter), [gaps[index] for gaps in variants])
        for index, counted in enumerate(candidates)
    ]
    best, gap, _ = min(found.gaps, key=lambda row: row[1])
    if gap <= found.tolerance:
        yield from prove([best.weigh(part, splitter) for part in parts])
    elif splits_by_row:
        weights = [[counted.weigh(part, splitter) for part in parts] for counted in candidates]
        found.culprit = yield from _find_culprit(found, dataclasses.replace(like, counts=tuple(counts)), whole, weights)
    return found


def _find_culprit(
    found: Evidence, of_rows: TrialForward, whole: TrialOutcome, weights: Sequence[Sequence[float]]
) -> Generator[list[TrialForward], list[TrialOutcome], str]:
    """Return what does not come back from parts, by the losses of rows of the whole's outputs."""
    rows = (yield [of_rows])[0].parts
    alike = [gap_of(whole.value, rows, own) for own in weights if rows]
    # A loss that the model computed itself is the same number whatever rows are taken.
    if not alike or min(alike) > found.tolerance or set(rows) == {whole.value}:
        return "loss"
    return "branches" if whole.branches else "model"


def _as_summed(
    found: Evidence,
    tried: TriedLoss,
    prove: Callable[[], Generator[list[TrialForward], list[TrialOutcome], None]] | None,
) -> Generator[list[TrialForward], list[TrialOutcome], Evidence]:
    """Return evidence of a Loss.

    Where a model branches on values, it says that parts may decide for themselves; it does not say that samples see one another.
    """
    whole = tried.whole
    found.is_apart = bool(whole.weight) and not whole.branches and tried.gap(whole, tried.outcomes) > found.tolerance
    if prove is not None and not found.is_apart:
        yield from prove()
    return found


def _as_weighed(
    found: Evidence,
    of_rows: TrialForward,
    whole: TrialOutcome,
    outcomes: Sequence[TrialOutcome],
    weights: Sequence[float],
) -> Generator[list[TrialForward], list[TrialOutcome], Evidence]:
    """Return evidence of means with known weights; none of a forward that branches on values, which was told before."""
    if whole.branches or not sum(weights):
        return Evidence(obstacle="its parts may decide for themselves, or nothing counts")
    gap = gap_of(whole.value, [outcome.value for outcome in outcomes], weights)
    found.gaps = [(Counted(), gap, [])]
    if gap > found.tolerance:
        found.culprit = yield from _find_culprit(found, of_rows, whole, [weights])
    return found


def _prove(
    found: Evidence, proofs: Proofs, tried: TriedLoss, weights: Sequence[float] | None = None
) -> Generator[list[TrialForward], list[TrialOutcome], None]:
    """Try what the loss does not show, and note why parts do not give it."""
    if not proofs.are_wanted:
        return
    sums = [outcome.weight or 0.0 for outcome in tried.outcomes]
    tried = dataclasses.replace(tried, weights=sums if weights is None else weights)
    if not sum(tried.weights):
        return
    found.apart, found.kept, found.untried = yield from try_all(tried, list(proofs.changes()))


def _try_whole(
    like: TrialForward, parts: Sequence[Any], casts: torch.dtype | None
) -> Generator[list[TrialForward], list[TrialOutcome], tuple[TrialOutcome, TrialForward, Evidence | None]]:
    """Return the outcome of the whole share, the trial that gave it, and the evidence if no other trial is needed."""
    whole = (yield [like])[0]
    # Code may want its own dtype, or autocast: weights in several, a batch in another one than theirs.
    others = ([dataclasses.replace(like, is_wide=False)] if like.is_wide else []) + (
        [dataclasses.replace(like, is_wide=False, casts=casts)] if casts is not None else []
    )
    for other in others:
        if (whole.obstacle or "").startswith(RAISED):
            again = (yield [other])[0]
            if not (again.obstacle or "").startswith(RAISED):
                whole, like = again, other
    if whole.written and len(parts) > 1:
        one = (yield [dataclasses.replace(like, batch=parts[0])])[0]
        name = find_dependent(whole.written, one.written, left=whole.left)
        if name is not None:
            end = Evidence(obstacle=f"it sets its parameter '{name}' by the batch", written=name)
            return whole, like, end
    if whole.obstacle is not None:
        before, trained, like = whole, like, dataclasses.replace(like, evaluates=True)
        whole = (yield [like])[0]
        if before.obstacle == DRAWS and (whole.obstacle or "").startswith(RAISED):
            # A detector gives no terms of a loss in eval mode; what it draws may be a choice of one.
            like = dataclasses.replace(trained, ahead=0)
            again = yield [dataclasses.replace(like, ahead=1), like]
            if all(a.obstacle is None and gap_of(a.value, [before.value], [1.0]) < _SAME for a in again):
                whole = again[1]
    if whole.obstacle == DRAWS and whole.weight is not None:
        return whole, like, Evidence(is_sum=True)  # it says itself what it counts
    if whole.obstacle is not None or not math.isfinite(whole.value):
        return whole, like, Evidence(obstacle=whole.obstacle or f"{NOT_FINITE} {whole.value}")
    return whole, like, None


def _candidates(share: Any, paths: Sequence[Path], ignored: Sequence[int]) -> list[Counted]:
    found = [Counted()]
    for path in paths:
        labels = tensor_at(share, path)
        shifts = (False, True) if labels is not None and labels.dim() > 1 else (False,)
        found += [Counted(path, shifted, value) for value in ignored for shifted in shifts]
    return found


def _mask(share: Any, path: Path, labels: torch.Tensor, value: int, counts: Sequence[int]) -> Any:
    """Return the batch with labels ignored: the first of each row in the first part, the last ones in the second."""
    masked = labels.clone()
    first, second = slice(0, counts[0]), slice(counts[0], counts[0] + counts[1])
    if labels.dim() == 1:
        masked[0] = value
    else:
        length = labels.shape[1]
        masked[first, :1] = value
        masked[second, length - max(1, length // 3) :] = value
    return replace_at(share, path, masked)


def _fit(
    whole: TrialOutcome,
    outcomes: Sequence[TrialOutcome],
    parts: Sequence[Any],
    counted: Counted,
    splitter: BatchSplitter,
) -> float:
    return gap_of(whole.value, [o.value for o in outcomes], [counted.weigh(part, splitter) for part in parts])


def _tolerance(module: nn.Module, whole: TrialOutcome, noise: float) -> float:
    least, most = _TOLERANCES.get(whole.dtype, _LOW_TOLERANCE)
    tolerance = min(max(least, ROUNDINGS * noise), most)
    on_cuda = any(parameter.is_cuda for parameter in module.parameters())
    rounds = on_cuda and torch.get_float32_matmul_precision() != "highest" and whole.dtype != torch.float64
    return max(tolerance, _LOW_PARAMETERS) if rounds or whole.is_coarse else tolerance


def _describe(whole: TrialOutcome, outcomes: Sequence[TrialOutcome], counts: Sequence[int]) -> str:
    first, *values = [_text_of(outcome) for outcome in (whole, *outcomes)]
    sizes = ", ".join(map(str, counts))
    return f"{first} over {sum(counts)} samples of the first batch, and {', '.join(values)} over parts of {sizes}"


def _text_of(outcome: TrialOutcome) -> str:
    return f"{outcome.value:.6g}" + ("" if outcome.weight is None else f" / {outcome.weight:.6g}")
