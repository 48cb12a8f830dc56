"""Whole batches under ``batch=auto``: what ranks step on where parts of a batch do not give one device's loss.

The script goes on giving each dp rank its share. Ranks exchange them, and each steps on all samples, as under ``batch=whole``. A
share's form travels as JSON and its tensors as bytes, in one exchange each. A pipeline takes a batch as one micro-batch then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshwright.apply.engine import Engine
from meshwright.describe.batches import BatchSplitter, split_samples
from meshwright.errors import ApplyError
from meshwright.run.losses.enough import has_rows_alone
from meshwright.run.losses.loss import LossRule
from meshwright.run.losses.trial_parts import join_samples
from meshwright.run.share_forms import built_of, form_of, obstacle_of
from meshwright.trees import map_tensors, tensors_in, with_attributes

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_MOST_TRIED = 8
"""Samples of all ranks in a trial where shares are small [count]."""
_FIX = "batch=whole in the plan, and the whole batch on every rank"
_KEEPS_TIME = (
    "where the loss alone compares samples, a loop of your own with the loss over mw.gather_batch(outputs, model) keeps dp's "
    "time"
)


class JoinedShares:
    """Joins the shares that dp ranks are given, and a pipeline's micro-batches.

    Args:
        engine: The strategy.
        splitter: How batches are counted and cut.
        rule: The loss, which knows why parts of a batch are refused.
        is_allowed: Whether the plan leaves the choice, and would cut a whole batch no further.
        most: Samples above which the plan cuts a share into micro-batches; such shares of a first batch are not joined [samples].
        cut: Returns the micro-batches of a share.
        joins_parts: Whether micro-batches are joined as well.
    """

    def __init__(
        self,
        engine: Engine,
        splitter: BatchSplitter,
        rule: LossRule,
        *,
        cut: Callable[[Any], list[Any]],
        is_allowed: bool,
        most: int | None = None,
        joins_parts: bool = False,
    ) -> None:
        self._engine, self._splitter, self._rule, self._cut = engine, splitter, rule, cut
        self._is_allowed, self._most, self._joins_parts = is_allowed, None if joins_parts else most, joins_parts
        self._could_not = self._has_warned = False
        self._last: tuple[list[Any], Any] | None = None
        """The form of this rank's last share with samples, and that share without them."""

    def of_step(self, batch: Any) -> Any:
        """Return the batch that this rank steps on: what it was given, or all ranks' shares of it.

        Raises:
            ApplyError: On every rank: shares are to be joined, and cannot be.
        """
        if not self._engine.joins_shares:
            return batch
        joined, obstacle, _ = self._join(batch)
        if obstacle:
            raise ApplyError(
                f"this plan's dp ranks join their shares of each batch, since {self._engine.joins_shares}; these cannot be "
                f"joined: {obstacle}",
                fix=f"shares of one form on all ranks; or {_FIX}",
            )
        return joined

    @contextlib.contextmanager
    def in_reserve(self, batch: Any) -> Iterator[None]:
        """Run the trials of this share: those that show nothing ask for a whole batch, where ranks may join their shares.

        All ask for some samples of each rank, or of each micro-batch, since one may lack what the batch has: two samples of one
        class.
        """

        def join(share: Any = batch) -> tuple[Any, list[int]] | None:
            joined, obstacle, counts = self._whole(share)
            return None if obstacle else (joined, counts)

        def join_all() -> tuple[Any, list[int]] | None:
            found = join()
            return (found[0], self._counts_of_parts(*found)) if found is not None and self._joins_parts else found

        is_possible = self._is_allowed and not self._takes_whole and not self._could_not
        self._rule.join = join_all if is_possible else None
        if self._splitter.splits_by_row:
            has_others = self._engine.num_shares > 1
            self._rule.join_some = lambda: join(self._some_of(batch)) if has_others else self._some_of_parts(batch)
        try:
            yield
        finally:
            self._rule.join = self._rule.join_some = None

    def after(self, error: ApplyError, batch: Any) -> Any:
        """Have ranks take whole batches from now on, in one micro-batch, and return this one whole; every rank calls it.

        Where shares cannot be joined, and parts are not known to fail or are to be compared even so, ranks go on with shares.

        Args:
            error: What has refused the first batch's parts.
            batch: This rank's share of it.

        Raises:
            ApplyError: `error` itself, where it was something else, or whole batches do not help.
        """
        engine, rule = self._engine, self._rule
        if error is not rule.refusal or not self._is_allowed or self._takes_whole:
            raise error
        joined, obstacle, _ = self._whole(batch)
        self._could_not = bool(obstacle)
        if obstacle and (rule.is_in_doubt or not rule.refuses):
            return batch
        if obstacle:
            error.add_note(f"ranks could not join their shares to a whole batch by themselves: {obstacle}")
            raise error
        rule.norms = None  # a layer that sees all samples needs no other rank's
        if engine.group.size > 1:
            engine.takes_whole_batch, engine.joins_shares = True, error.message
        if self._joins_parts:
            engine.joins_micro_batches = error.message
        if engine.everyone.group_rank == 0:
            split = "takes it part by part" if rule.is_in_doubt else "refuses the model instead"
            fix = "" if error.fix is None else f"; batch=split {split}, with this fix: {error.fix}"
            ends = fix + f"; {_KEEPS_TIME}" * bool(engine.joins_shares)
            _LOG.warning("%s%s", "; ".join(engine.joined_reasons), ends)
        return joined

    def forget_obstacle(self) -> None:
        """Forget that shares could not be joined: another batch is the first one."""
        self._could_not = False

    def warn_of_call(self) -> None:
        """Say once, where ranks join their shares in steps, that a call of the model by the script does not."""
        engine = self._engine
        if engine.joins_shares and not engine.is_at_work and not self._has_warned and engine.group.group_rank == 0:
            self._has_warned = True
            _LOG.warning(
                "model(...) was called with a share of the batch: ranks join their shares in steps and in model.evaluate, and "
                "not in such a call, whose outputs see this share's samples alone, gathered ones too; give it the whole batch "
                "where samples see one another. They join them since %s",
                engine.joins_shares,
            )

    def find_own_loop(self) -> ApplyError | None:
        """Return the error of an own loop where ranks join their shares in steps, or None."""
        if not self._engine.joins_shares:
            return None
        return ApplyError(
            "an own loop follows a step whose ranks have joined their shares of the batch, and in an own loop each rank would "
            f"go on with its share. They have joined them since {self._engine.joins_shares}",
            fix=_FIX,
        )

    @property
    def _takes_whole(self) -> bool:
        return self._engine.takes_whole_batch or bool(self._engine.joins_micro_batches)

    def _whole(self, batch: Any) -> tuple[Any, str, list[int]]:
        """Return `_join` of the shares, or the batch itself where one rank of each stage takes it."""
        return self._join(batch) if self._engine.group.size > 1 else (batch, "", [self._splitter.count(batch)])

    def _counts_of_parts(self, whole: Any, counts: list[int]) -> list[int]:
        """Return the samples of all ranks' micro-batches of a whole batch, in their order [samples]."""
        shares = split_samples(whole, counts) if len(counts) > 1 else [whole]
        return [self._splitter.count(part) for share in shares for part in self._cut(share)]

    def _some_of(self, batch: Any) -> Any:
        """Return this rank's part of a batch for a trial that takes samples of many ranks; every rank calls it."""
        group, count = self._engine.group, self._splitter.count(batch)
        # A rank may give none of its samples, and knows their form even so.
        has_obstacle = "obstacle" in self._told(batch)
        with group.ledger.of_checks():
            counts = group.all_gather_json(count, device=group.message_device(self._engine.device))
        few = some_of_each(counts)[group.group_rank]
        if few == count or has_obstacle:
            return batch
        return split_samples(batch, [few, count - few])[0] if few else None

    def _some_of_parts(self, batch: Any) -> tuple[Any, list[int]] | None:
        """Return samples of this rank's micro-batches, and how many of each, or None; ranks of one share find the same."""
        parts = self._cut(batch)
        counts = list(map(self._splitter.count, parts))
        few = some_of_each(counts) if len(parts) > 1 else []
        if few == counts:
            return (batch, counts) if parts else None
        if not few or not has_rows_alone(batch, sum(counts)):
            return None
        pieces = [
            split_samples(part, [n, count - n])[0] for part, n, count in zip(parts, few, counts, strict=True) if n
        ]
        joined = join_samples(pieces)
        return None if joined is None else (joined, few)

    def _join(self, batch: Any) -> tuple[Any, str, list[int]]:
        """Return all ranks' shares as one batch, or why there is none, and the samples of each; the same on every rank."""
        group, everyone = self._engine.group, self._engine.everyone
        device = group.message_device(self._engine.device)
        with group.ledger.of_checks():
            told = group.all_gather_json(self._told(batch), device=device)
            obstacles = everyone.all_gather_json(obstacle_of(told, group.ranks), device=device)
            if obstacle := next(filter(None, obstacles), ""):
                return None, obstacle, []
            form = next(row["form"] for row in told if row["count"])
            tree = batch if self._splitter.count(batch) else self._example(form)
            parts = group.all_gather_uneven(_bytes_of(tree).to(device))
        counts = [row["count"] for row in told]
        are_alike = len({json.dumps(row["first"]) for row in told if row["count"]}) == 1
        joined = _Joined(_columns(form, counts, parts), are_alike=are_alike)
        return with_attributes(map_tensors(tree, joined), tree), "", counts

    def _told(self, batch: Any) -> dict[str, Any]:
        """Return the samples and the form of this rank's share as JSON; the form of the last one where it has none now."""
        count = self._splitter.count(batch)
        if not count:
            return {"count": 0, "form": None if self._last is None else self._last[0]}
        if self._most is not None and count > self._most and not self._engine.joins_shares:
            obstacle = (
                f"a share of {count} samples is cut into micro-batches, of at most {self._most} (micro_batch_size)"
            )
            return {"count": count, "obstacle": obstacle}
        if getattr(batch, "num_samples", None) is not None:
            return {"count": count, "obstacle": "the batch itself says how many samples it has (num_samples)"}
        try:
            form = form_of(batch, count)
        except ApplyError as error:
            return {"count": count, "obstacle": error.message}
        self._last = form, map_tensors(batch, lambda tensor: tensor[:0].clone() if tensor.dim() else tensor)
        return {"count": count, "form": form, "first": _first_places(batch)}

    def _example(self, form: Any) -> Any:
        """Return a batch without samples of a form."""
        return self._last[1] if self._last is not None and self._last[0] == form else built_of(form)


def some_of_each(counts: Sequence[int]) -> list[int]:
    """Return how many samples of each rank a trial takes that shows what samples of several ranks do to one another [count].

    A trial without gradients of twice as many samples as a share has takes less memory than a step. Of more ranks than that,
    some are left out, at even distances: the second views of all samples may lie half of the ranks away.

    >>> some_of_each([2, 2, 2, 2])
    [2, 2, 2, 2]
    >>> some_of_each([16, 16, 16, 3])
    [8, 8, 8, 3]
    >>> some_of_each([1] * 16)
    [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    """
    most = max(2 * max(counts), _MOST_TRIED)
    if sum(counts) <= most:
        return list(counts)
    full = [place for place, count in enumerate(counts) if count]
    chosen = full[:: math.ceil(len(full) / most)]
    return [min(count, most // len(chosen)) if place in chosen else 0 for place, count in enumerate(counts)]


# -- what travels ---------------------------------------------------------------------------------------------------------


def _first_places(tree: Any) -> list[int]:
    """Return where each tensor of a batch stands first, by its number: of one in two places the first of them."""
    places: dict[int, int] = {}
    return [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors_in(tree))]


def _bytes_of(tree: Any) -> torch.Tensor:
    """Return the bytes of all tensors with samples, one after the other."""
    rows = [tensor.detach().resolve_conj().resolve_neg().cpu() for tensor in tensors_in(tree) if tensor.dim()]
    # One row of a wider tensor counts as contiguous, and cannot be viewed as bytes.
    return torch.cat([row.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for row in rows])


def _columns(form: list[Any], counts: Sequence[int], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the joined tensors of a form, from the bytes of all ranks."""
    places = [0] * len(parts)
    joined: list[torch.Tensor] = []
    for _, kind, shape in _rows_of(form):
        dtype, pieces = getattr(torch, kind), list[torch.Tensor]()
        for index, (count, part) in enumerate(zip(counts, parts, strict=True)):
            end = places[index] + count * math.prod(shape) * dtype.itemsize
            pieces.append(part[places[index] : end].clone().view(dtype).reshape(count, *shape))
            places[index] = end
        joined.append(torch.cat(pieces))
    return joined


def _rows_of(form: list[Any]) -> Iterator[list[Any]]:
    kind, _, held = form
    if kind == "rows":
        yield form
    elif kind in ("mapping", "items"):
        for inside in held:
            yield from _rows_of(inside[1] if kind == "mapping" else inside)


class _Joined:
    """Gives each tensor of a share the joined one, in order; a tensor in two places stays one, where all shares are alike."""

    def __init__(self, columns: Sequence[torch.Tensor], *, are_alike: bool) -> None:
        self._next = iter(columns)
        self._are_alike = are_alike
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        column = next(self._next)
        return self._made.setdefault(id(tensor), column) if self._are_alike else column
