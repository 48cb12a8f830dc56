"""Trial forwards of the first batch, its parts, and copies with ignored labels, and their evidence about the loss on one rank.

A mean over n of N items can be computed from parts: sum of n x loss / N. Trials find which items it counts; some labels are set
to the ignored value, so that counts differ between parts. A model that draws random numbers or keeps batch statistics in training
is tried in eval mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.apply.modules.copies import own_copy
from meshwright.apply.state.outside import Outside
from meshwright.apply.state.undisturbed import GeneratorStates, buffer_versions, draw_ahead, undisturbed
from meshwright.describe.batches import BatchSplitter, split_samples
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.trial_watch import TrialWatch, term_with_slopes
from meshwright.run.losses.trial_writes import OwnBackwardError, find_dependent
from meshwright.run.losses.weights import IGNORED_LABEL, Counted, Path, is_decoded, label_paths, replace_at, tensor_at
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

NUM_PARTS = 3
"""Parts that the first batch is tried in [count]."""
_TOLERANCES = {torch.float64: (2e-7, 2e-6), torch.float32: (4e-6, 1e-4)}
"""By how much equal losses may differ, by their dtype: at least, and where the order of samples alone makes more [fraction]."""
_LOW_TOLERANCE = (1e-2, 2e-2)
_SAME = 1e-9
"""Losses that differ by less are the same whatever was drawn [fraction]."""
_ROUNDINGS = 32.0
"""How many times the difference that another order of the samples makes is tolerated [ratio]."""
_LOW_PARAMETERS = 5e-3
"""For a model in less than float32, or one whose matrix products are rounded to TF32 [fraction]."""


class DrawsOfTrial(Protocol):
    """Random numbers of one trial (`run/global_draws.py`)."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forward."""
        ...

    def take(self, outputs: Any) -> None:
        """Take the model's outputs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TrialForward:
    """One forward to run."""

    batch: Any
    evaluates: bool
    """Whether in eval mode; else in the mode that the model is in."""
    counts: tuple[int, ...] = ()
    """Rows of the outputs to take the loss of, each beside the same rows of the batch, instead of the loss of all."""
    draws: DrawsOfTrial | None = None
    """By which its random numbers are drawn by place, in training mode; None: as torch does."""
    ahead: int | None = None
    """Numbers that each generator draws before it, where random numbers do not decide the loss; None: they may [count]."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Result of a trial."""

    value: float = math.nan
    weight: float | None = None
    """The weight of a Loss; None for a mean."""
    dtype: torch.dtype = torch.float64
    ignored: tuple[int, ...] = ()
    """Labels that the cross-entropies in it ignored."""
    has_class_weights: bool = False
    branches: bool = False
    """Whether Python read a value of a tensor."""
    parts: tuple[float, ...] = ()
    """The losses of the trial's rows."""
    obstacle: str | None = None
    """Why nothing can be concluded from it."""
    written: tuple[tuple[str, Tensor], ...] = ()
    """Parameters that the forward has set, by FQN; they are put back."""
    own_generator: str = ""
    """The place of a generator of the model's own that has drawn."""


@dataclasses.dataclass(kw_only=True)
class Evidence:
    """Findings of one rank; plain values, since ranks exchange them."""

    obstacle: str | None = None
    is_sum: bool = False
    """Whether loss_fn returned a Loss."""
    tolerance: float = 0.0
    gaps: list[tuple[Counted, float, list[float | None]]] = dataclasses.field(default_factory=list)
    """For each thing that the mean may count: how far the parts are from the whole, relatively, and so with ignored labels."""
    masked: list[tuple[Path, int, float, bool]] = dataclasses.field(default_factory=list)
    """Where labels were ignored for that, which value is, how many of a sample are in the data, and whether it could be tried."""
    numbers: str = ""
    """The losses, for people."""
    is_total: bool = False
    """Whether the loss of the whole is the sum of the parts' losses."""
    has_class_weights: bool = False
    written: str | None = None
    """A parameter that the forward sets by its batch."""
    branches: bool = False
    """Whether the model's forward reads values of its batch in Python, so that another batch may take another way."""
    own_generator: str = ""
    """The place of a generator of the model's own that draws in its forward."""
    culprit: str = "loss"
    """What does not come back from parts: the "loss", the "model" before it, or the model's "branches"."""


RAISED = "it raised"
"""How the obstacle of a trial begins whose code has raised."""

DRAWS = "it draws random numbers"
"""The obstacle of a trial in which a generator has moved."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def run_trial(
    module: nn.Module,
    device: torch.device,
    trial: TrialForward,
    forward: Callable[[Any], Any],
    term: Callable[[Any, Any], LossTerm],
    *,
    has_graph: bool = False,
) -> TrialOutcome:
    """Return the results of a forward and its loss; an exception in them is an obstacle, and all state is restored.

    Args:
        module: The model.
        device: Its device.
        trial: The trial.
        forward: batch -> outputs.
        term: (outputs, batch) -> loss.
        has_graph: Whether code may take gradients inside.
    """
    batch = own_copy(trial.batch)  # the next trial, and the step, take what this one's code may write into
    with undisturbed(module, device):
        if trial.evaluates:
            module.eval()
        elif trial.draws is not None:
            module.train()
        normalises = any(
            isinstance(m, _BATCH_NORMS) and (m.training or m.running_mean is None) for m in module.modules()
        )
        draw_ahead(device, trial.ahead or 0)
        generators, versions, watch = GeneratorStates(device), buffer_versions(module), TrialWatch()
        own = Outside.of(module).generator_states()
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                _eagerly(),
                watch,
                torch.set_grad_enabled(has_graph),
                torch.autocast(device.type, enabled=False),
                contextlib.nullcontext() if trial.draws is None else trial.draws.running(),
            ):
                outputs = forward(batch)
                if trial.draws is not None:
                    trial.draws.take(outputs)
                branches = watch.branches
                if trial.counts:
                    rows = zip(_rows(outputs, trial.counts), split_samples(batch, trial.counts), strict=True)
                    return TrialOutcome(parts=tuple(float(term_with_slopes(term, *pair).value) for pair in rows))
                found = term_with_slopes(term, outputs, batch)
            value, weight = float(found.value), None if found.is_mean else float(found.weight)
        except OwnBackwardError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code: what it raises here it raises in the step, too
            return TrialOutcome(obstacle=f"{RAISED} {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        obstacle = None
        if normalises:
            obstacle = "it normalises with statistics of the batch"
        elif trial.ahead is None and generators.have_moved():
            obstacle = DRAWS
        elif buffer_versions(module) != versions:
            obstacle = "it writes into its buffers"
        return TrialOutcome(
            value,
            weight,
            found.value.dtype,
            tuple(dict.fromkeys(watch.ignored)),
            watch.has_class_weights,
            branches,
            obstacle=obstacle,
            own_generator=next(
                (a[0] for a, b in zip(own, Outside.of(module).generator_states(), strict=False) if a != b), ""
            ),
        )


def _rows(outputs: Any, counts: Sequence[int]) -> Iterator[Any]:
    """Yield the outputs of each part; those without one row for each sample are the same in all of them."""
    start = 0
    for count in counts:
        stop = start + count

        def cut(tensor: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return tensor[start:stop] if tensor.dim() > 0 and tensor.shape[0] == sum(counts) else tensor

        yield map_tensors(outputs, cut)
        start = stop


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    # Other batch sizes would make torch.compile compile again; importing it takes seconds.
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else contextlib.nullcontext()


def examine(
    share: Any, module: nn.Module, splitter: BatchSplitter, *, splits_by_row: bool
) -> Generator[list[TrialForward], list[TrialOutcome], Evidence]:
    """Yield trials, receive their outcomes, and return the evidence.

    Args:
        share: At least two samples.
        module: The model, for the dtypes that it computes in.
        splitter: Counts and cuts batches.
        splits_by_row: Whether dim 0 is the sample in every tensor.
    """
    parts = splitter.cut(share, min(NUM_PARTS, splitter.count(share)))
    whole, like, end = yield from _try_whole(share, parts)
    if end is not None:
        return end
    num_samples = splitter.count(share)
    turned = (
        (yield [dataclasses.replace(like, batch=map_tensors(share, _turn))])[0].value if splits_by_row else math.nan
    )
    noise = _gap(whole.value, [turned], [1.0])
    if len(parts) < 2:
        return Evidence(obstacle="split= does not cut the first batch")
    outcomes = yield [dataclasses.replace(like, batch=part) for part in parts]
    obstacle = next((outcome.obstacle for outcome in outcomes if outcome.obstacle is not None), None)
    if obstacle is not None:
        return Evidence(obstacle=obstacle)
    counts = [splitter.count(part) for part in parts]
    found = Evidence(
        is_sum=whole.weight is not None,
        tolerance=_tolerance(module, whole.dtype, share, noise),
        numbers=_describe(whole, outcomes, counts),
        is_total=_gap(whole.value, [o.value for o in outcomes], [1.0] * len(parts), divide=False) < _LOW_PARAMETERS,
        has_class_weights=whole.has_class_weights,
        branches=whole.branches,
        own_generator=whole.own_generator,
    )
    if found.is_sum:
        return found
    paths = label_paths(share, num_samples) if splits_by_row else []
    ignored = whole.ignored or (IGNORED_LABEL,)
    candidates = _candidates(share, paths, ignored)
    variants: list[list[float | None]] = []
    for path, value in ((path, value) for path in paths for value in ignored):
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
    if splits_by_row and all(gap > found.tolerance for _, gap, _ in found.gaps):
        rows = (yield [dataclasses.replace(like, counts=tuple(counts))])[0].parts
        alike = [_gap(whole.value, rows, [counted.weigh(p, splitter) for p in parts]) for counted in candidates if rows]
        # A loss that the model computed itself is the same number whatever rows are taken.
        if alike and min(alike) <= found.tolerance and set(rows) != {whole.value}:
            found.culprit = "branches" if whole.branches else "model"
    return found


def _try_whole(
    share: Any, parts: Sequence[Any]
) -> Generator[list[TrialForward], list[TrialOutcome], tuple[TrialOutcome, TrialForward, Evidence | None]]:
    """Return the outcome of the whole share, the trial that gave it, and the evidence if no other trial is needed."""
    like = TrialForward(share, False)
    whole = (yield [like])[0]
    if whole.written and len(parts) > 1:
        one = (yield [dataclasses.replace(like, batch=parts[0])])[0]
        name = find_dependent(whole.written, one.written)
        if name is not None:
            end = Evidence(obstacle=f"it sets its parameter '{name}' by the batch", written=name)
            return whole, like, end
    if whole.obstacle is not None:
        before, like = whole, TrialForward(share, True)
        whole = (yield [like])[0]
        if before.obstacle == DRAWS and (whole.obstacle or "").startswith(RAISED):
            # A detector gives no terms of a loss in eval mode; what it draws may be a choice of one.
            like = TrialForward(share, False, ahead=0)
            again = yield [dataclasses.replace(like, ahead=1), like]
            if all(a.obstacle is None and _gap(a.value, [before.value], [1.0]) < _SAME for a in again):
                whole = again[1]
    if whole.obstacle == DRAWS and whole.weight is not None:
        return whole, like, Evidence(is_sum=True)  # it says itself what it counts
    if whole.obstacle is not None or not math.isfinite(whole.value):
        return whole, like, Evidence(obstacle=whole.obstacle or f"it is {whole.value}")
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
    return _gap(whole.value, [o.value for o in outcomes], [counted.weigh(part, splitter) for part in parts])


def _gap(whole: float, values: Sequence[float], weights: Sequence[float], *, divide: bool = True) -> float:
    """Return the relative distance of the parts' weighted mean (or sum) from the whole; infinite where it is not finite."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in pairs)
    if not total:
        return math.inf
    together = sum(value * weight for value, weight in pairs) / (total if divide else 1.0)
    scale = max([abs(whole), *(abs(value) for value, _ in pairs)])
    gap = abs(together - whole) / scale if scale else 0.0
    return gap if math.isfinite(gap) else math.inf


def _turn(tensor: Tensor) -> Tensor:
    return tensor.flip(0) if tensor.dim() > 0 else tensor


def _tolerance(module: nn.Module, dtype: torch.dtype, share: Any, noise: float) -> float:
    least, most = _TOLERANCES.get(dtype, _LOW_TOLERANCE)
    tolerance = min(max(least, _ROUNDINGS * noise), most)
    tensors: Iterable[torch.Tensor] = [*module.parameters(), *tensors_in(share)]
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    on_cuda = any(parameter.is_cuda for parameter in module.parameters())
    rounds = on_cuda and torch.get_float32_matmul_precision() != "highest" and torch.float32 in kinds
    return max(tolerance, _LOW_PARAMETERS) if rounds or kinds & {torch.float16, torch.bfloat16} else tolerance


def _describe(whole: TrialOutcome, outcomes: Sequence[TrialOutcome], counts: Sequence[int]) -> str:
    values = ", ".join(f"{outcome.value:.6g}" for outcome in outcomes)
    sizes = ", ".join(map(str, counts))
    return f"{whole.value:.6g} over {sum(counts)} samples of the first batch, and {values} over parts of {sizes}"


def join_samples(samples: Sequence[Any]) -> Any:
    """Return parts of a batch as one, in this order; None where their tensors do not fit."""
    columns = list(zip(*(tensors_in(sample) for sample in samples), strict=False))
    if any(len({tensor.shape[1:] for tensor in column}) > 1 for column in columns):
        return None
    joined = iter([torch.cat(column) if column[0].dim() > 0 else column[0] for column in columns])
    return map_tensors(samples[0], lambda _: next(joined))


def second_sample(sample: Any) -> Any:
    """Return another sample made from one: its rows are rolled by one place, which changes no value."""
    return map_tensors(sample, lambda t: torch.roll(t, 1, 1) if t.dim() > 1 else t)
