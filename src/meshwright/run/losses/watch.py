"""Watch, before the optimizer steps, for a loss that was a mean over samples on the first batch and no longer is.

Only the loss is computed again, on the existing outputs: all rows, parts of them, and one row beside one of an earlier batch.
This happens in the first steps, at sentinels, and whenever the batch or the loss is of a new kind. That may be labels with a new
value, a mask that is no longer all true, weights that differ, new sizes, or a changed value that the loss reads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import WrapperTensor, without_function_modes
from meshwright.apply.state.outside import Outside
from meshwright.apply.state.undisturbed import GeneratorStates
from meshwright.describe.batches import BatchSplitter, split_samples
from meshwright.errors import ApplyError
from meshwright.layout import even_sizes
from meshwright.run.losses.loss import WHOLE_BATCH, LossRule
from meshwright.run.losses.weights import Path, tensors_by_path
from meshwright.trees import map_tensors, tensors_in

__all__: list[str] = []

_FIRST_STEPS = 16
"""Steps at the beginning of which each is looked at [count]."""
_MAX_KINDS = 256
"""Kinds of batches that are looked at when they come first; what is ever new is looked at by sentinels alone [count]."""
_MAX_CHANGES = 32
"""Changes of a value that the loss reads after which it is taken for a counter [count]."""
_NUM_ROWS = 4
"""Rows that are looked at where outputs are large [count]."""
_LARGE_BYTES = 2**24
_TOO_LARGE_BYTES = 2**28
"""Outputs that are not looked at at all, since copies of them may not fit [bytes]."""
_NUM_VALUES = 2**18
"""Label values that are told from each other [count]."""
_TOLERANCES = {torch.float64: 2e-6, torch.float32: 1e-4}
_LOW_TOLERANCE = 2e-2
_NAMES = ("label", "target", "mask", "weight", "pad", "valid", "length")

FIX = (
    "return meshwright.Loss(sum, weight) from loss_fn: the sum of what is counted, and how much that is; a loss that compares "
    f"the samples of a batch with each other needs the batch whole: {WHOLE_BATCH}"
)


class LossWatch:
    """Tries the loss of each new kind of batch on parts of its outputs.

    Args:
        rule: The loss, and what it counts.
        splitter: Counts and cuts batches.
        device: The device whose generator the loss may draw from.
        is_threaded: Whether several threads compute losses at once.
    """

    def __init__(self, rule: LossRule, splitter: BatchSplitter, device: torch.device, *, is_threaded: bool) -> None:
        self._rule = rule
        self._splitter = splitter
        self._device = device
        self._is_threaded = is_threaded
        self._outside = Outside(None, [rule.loss_fn]) if rule.loss_fn is not None else None
        self.is_on = self._outside is not None and splitter.splits_by_row
        """Whether the loss can be looked at."""
        self.is_cut = False
        """Whether batches are taken in parts, and a loss that parts do not give is refused."""
        self._kinds: set[Any] = set()
        self._seen: dict[Path, Tensor] = {}
        self._values: list[Any] = []
        self._num_changes: Counter[int] = Counter()
        self._num_looks = 0
        self._rows: dict[int, int] | None = None
        """Outputs that have rows for each sample -> how many of them, one after the other [count]."""
        self._is_untried = False
        """Whether outputs of several rows a sample were not cut yet: the samples may lie in another order."""
        self._before: tuple[Any, Any] | None = None
        self._wanted = False
        self._has_gaps = False
        """Whether parts had no finite loss when they were compared last, and the whole has one."""
        self.failure: ApplyError | None = None
        """What was found in the step under way."""

    def begin(self, batch: Any, *, is_due: bool) -> None:
        """Decide whether to check the losses of this batch.

        Args:
            batch: This rank's share, or None.
            is_due: Whether a sentinel is due.
        """
        self.failure = None
        self._wanted = False
        if not (self.is_on and self.is_cut) or batch is None:
            return
        is_new = self._is_new_kind(batch)
        is_new = self._has_changed() or is_new
        self._wanted = is_due or is_new or self._num_looks < _FIRST_STEPS
        self._num_looks += self._wanted

    # -- what is new ------------------------------------------------------------------------------------------------

    def _is_new_kind(self, batch: Any) -> bool:
        if len(self._kinds) >= _MAX_KINDS:
            return False
        kind: list[Any] = []
        has_new_value = False
        for path, tensor in tensors_by_path(batch):
            kind.append((tensor.dtype, tensor.shape[1:]))
            if not is_read_by_losses(path) or not tensor.numel():
                continue
            if tensor.dtype == torch.bool:
                kind.append(bool(tensor.all()))
            elif tensor.is_floating_point():
                kind.append(bool((tensor == tensor.flatten()[0]).all()))
            else:
                has_new_value |= self._has_new_value(path, tensor)
        key = tuple(kind)
        if key in self._kinds and not has_new_value:
            return False
        self._kinds.add((key, len(self._kinds)) if key in self._kinds else key)
        return True

    def _has_new_value(self, path: Path, labels: Tensor) -> bool:
        seen = self._seen.get(path)
        if seen is None or seen.device != labels.device:
            seen = self._seen[path] = torch.zeros(_NUM_VALUES, dtype=torch.bool, device=labels.device)
        places = labels.long().bitwise_and(_NUM_VALUES - 1)  # negative ones count from the end
        is_known = bool(seen.take(places).all())
        if not is_known:
            seen[places] = True
        return not is_known

    def _has_changed(self) -> bool:
        """Tell whether a value that the loss reads has changed since the step before."""
        values = [] if self._outside is None else self._outside.plain_values()
        before, self._values = self._values, values
        if values == before:
            return False
        if len(values) != len(before):
            return True
        changed = [index for index, pair in enumerate(zip(values, before, strict=True)) if pair[0] != pair[1]]
        self._num_changes.update(changed)
        return any(self._num_changes[index] <= _MAX_CHANGES for index in changed)

    # -- the look ---------------------------------------------------------------------------------------------------

    def look(self, outputs: Any, part: Any) -> None:
        """Compare the loss of a micro-batch with the losses of its parts, if this batch is checked; keep what it finds."""
        if not (self._wanted and self.is_on) or self.failure is not None or self._rule.loss_fn is None:
            return
        # Outside the forward, since pipeline stages would send each other the tensors that it reads.
        with warnings.catch_warnings(action="ignore"), without_function_modes(), self._undisturbed():
            try:
                found = self._compare(outputs, part)
            except Exception:  # noqa: BLE001 - the user's loss: parts of these outputs cannot be taken
                found = None
                self.is_on = self.is_on and not self._is_untried
        if found is not None:
            self.failure = found

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        generators = GeneratorStates(self._device)
        outside = None if self._outside is None or self._is_threaded else self._outside.take()
        try:
            yield
        finally:
            if outside is not None:
                outside.restore()
            generators.restore()

    def _compare(self, outputs: Any, part: Any) -> ApplyError | None:
        tensors = list(tensors_in(outputs))
        size = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
        count = self._splitter.count(part)
        is_elsewhere = any(tensor.is_meta or isinstance(tensor, WrapperTensor) for tensor in tensors)
        if size > _TOO_LARGE_BYTES or is_elsewhere:
            return None
        rows = {
            index: t.shape[0] // count
            for index, t in enumerate(tensors)
            if t.numel() and t.dim() and not t.shape[0] % count and not _is_parameter(t)
        }
        if self._rows is None and count == 1 and any(num > 1 for num in rows.values()):
            return None  # of one sample it cannot be told whether they are its rows
        is_first = self._rows is None
        if is_first:
            self._rows = rows
        if not rows or not self._rows or not self._rows.items() <= rows.items():
            return None  # none with the first batch: packed samples, whose rows another batch may divide by chance
        self._is_untried = self._is_untried or (is_first and any(num > 1 for num in rows.values()))
        pair = _plain(outputs, self._rows or {}), part
        first = pair if count == 1 else next(self._cut(pair, [1, count - 1]))
        before, self._before = self._before, first
        if size > _LARGE_BYTES and count > _NUM_ROWS:
            pair, count = next(self._cut(pair, [_NUM_ROWS, count - _NUM_ROWS])), _NUM_ROWS
        self._has_gaps = False
        found = self._compare_halves(pair, count, is_first=is_first) if count > 1 else None
        if self._has_gaps and not is_first:
            # So small a part has no loss (the hardest tenth of five samples): the whole beside one as large has one.
            found = self._compare_halves(_doubled(pair, self._rows or {}), 2 * count, is_first=False)
        self._is_untried = False
        joined = None if before is None or not self.is_on else _joined(before, first, self._rows or {})
        return found if found is not None or joined is None else self._compare_halves(joined, 2, is_first=False)

    def _compare_halves(self, pair: tuple[Any, Any], count: int, *, is_first: bool) -> ApplyError | None:
        generators = GeneratorStates(self._device)
        whole = self._value(pair)
        if whole is None or generators.have_moved():
            self.is_on = False  # it has its own weight, or differs at each evaluation
            return None
        sizes = even_sizes(count, 2)
        parts = list(self._cut(pair, sizes))
        values = [self._value(each) for each in parts]
        # Values that are not finite are found after the step's sums, and named there.
        self._has_gaps = math.isfinite(whole) and any(
            value is not None and not math.isfinite(value) for value in values
        )
        if self._has_gaps or not math.isfinite(whole) or any(value is None for value in values):
            return None
        gap = _gap(whole, values, [self._rule.known_weight(each[1]) for each in parts])
        dtypes = {tensor.dtype for tensor in tensors_in(pair[0]) if tensor.is_floating_point()}
        tolerance = max((_TOLERANCES.get(dtype, _LOW_TOLERANCE) for dtype in dtypes), default=1e-4)
        if gap <= tolerance:
            return None
        told = ", ".join(f"{value:.6g}" for value in values)
        if is_first and _is_total(
            whole, values, tolerance
        ):  # a loss that could not be tried, since the model draws: a VAE's
            return ApplyError(
                f"what loss_fn returned is a sum over samples, not their mean: it is {whole:.6g} over {count} samples, and "
                f"{told} over parts of {sizes[0]} and {sizes[1]}, and this plan takes the batch part by part",
                fix="return meshwright.Loss(loss, num_samples) from loss_fn, or the mean",
            )
        if is_first:
            self.is_on = False  # the model's own forward had no such difference: its outputs are not one row a sample
            return None
        return ApplyError(
            "what loss_fn returned for this batch is not a mean over samples, as it was for the first batch: it is "
            f"{whole:.6g} over {count} samples, and {told} over parts of {sizes[0]} and {sizes[1]}, so that the parts which "
            "this plan takes do not give one device's loss",
            fix=FIX,
        )

    def _cut(self, pair: tuple[Any, Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        start = 0
        for size, part in zip(sizes, split_samples(pair[1], sizes), strict=True):

            def cut(tensor: Tensor, num: int, start: int = start, stop: int = start + size) -> Tensor:
                return tensor[start * num : stop * num]

            yield _map_rows(pair[0], self._rows or {}, cut), part
            start += size

    def _value(self, pair: tuple[Any, Any]) -> float | None:
        """Return the loss of copies, which a loss may write into; None where it has its own weight."""
        grad = torch.is_grad_enabled()

        def copy(tensor: Tensor) -> Tensor:
            held = tensor.detach()
            # No leaf, which a loss may not write into.
            return held.requires_grad_().clone() if grad and held.is_floating_point() else held.clone()

        # Each evaluation starts from the same state, since a loss may count its calls.
        compute = self._rule.term if self._is_threaded else self._rule.try_term
        term = compute(map_tensors(pair[0], copy), map_tensors(pair[1], lambda t: t.detach().clone()), 1.0)
        return float(term.value.detach()) if term.is_mean else None


def _is_parameter(tensor: Tensor) -> bool:
    """Tell whether an output is a parameter, or a view of its entries: as many as samples in the batch, it has no row of each."""
    held = tensor._base if tensor._is_view() else tensor
    return isinstance(held, nn.Parameter) and tensor.stride(0) != 0


def is_read_by_losses(path: Path) -> bool:
    name = next((key for key in reversed(path) if isinstance(key, str)), "").lower()
    # A batch that is one tensor is what an autoencoder's loss reads.
    return not path or path[0] == 1 or name == "y" or any(word in name for word in _NAMES)


def _map_rows(tree: Any, rows: Mapping[int, int], function: Callable[[Tensor, int], Tensor]) -> Any:
    places = itertools.count()

    def mapped(tensor: Tensor) -> Tensor:
        place = next(places)
        return function(tensor, rows[place]) if place in rows else tensor

    return map_tensors(tree, mapped)


def _plain(outputs: Any, rows: Mapping[int, int]) -> Any:
    return map_tensors(outputs, lambda tensor: tensor.detach()) if rows else outputs


def _joined(first: tuple[Any, Any], second: tuple[Any, Any], rows: Mapping[int, int]) -> tuple[Any, Any] | None:
    """Return two samples as one batch; None where their shapes differ."""
    columns = [list(zip(tensors_in(a), tensors_in(b), strict=False)) for a, b in zip(first, second, strict=True)]
    if any(a.shape != b.shape or a.dtype != b.dtype for column in columns for a, b in column):
        return None
    others = iter(columns[0])
    places = iter(range(len(columns[0])))

    def join_output(tensor: Tensor) -> Tensor:
        return torch.cat(next(others)) if next(places) in rows else (next(others), tensor)[1]

    outputs = map_tensors(second[0], join_output)
    pairs = iter(columns[1])
    part = map_tensors(second[1], lambda tensor: torch.cat(next(pairs)) if tensor.dim() else (next(pairs), tensor)[1])
    return outputs, part


def _doubled(pair: tuple[Any, Any], rows: Mapping[int, int]) -> tuple[Any, Any]:
    """Return a batch twice, the second time with the outputs of each sample beside the labels of the next."""
    outputs = _map_rows(pair[0], rows, lambda tensor, num: torch.cat([tensor, tensor.roll(num, 0)]))
    return outputs, map_tensors(pair[1], lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor)


def _is_total(whole: float, values: Sequence[float | None], tolerance: float) -> bool:
    """Tell whether a loss is the sum of those of its parts."""
    known = [value for value in values if value is not None]
    return abs(math.fsum(known) - whole) <= tolerance * max(map(abs, known), default=0.0)


def _gap(whole: float, values: Sequence[float | None], weights: Sequence[float]) -> float:
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0 and value is not None]
    total = sum(weight for _, weight in pairs)
    if not total:
        return 0.0
    together = sum(value * weight for value, weight in pairs) / total
    gap = abs(together - whole) / max([abs(whole), *(abs(value) for value, _ in pairs), 1e-300])
    return gap if math.isfinite(gap) else math.inf
