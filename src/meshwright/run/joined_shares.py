"""Shares joined to whole batches, under ``batch=auto``: what dp ranks step on where shares do not give one device's loss.

The script goes on giving each rank its share. Ranks exchange them, and each steps on all samples, as under ``batch=whole``. A
share's form travels as JSON and its tensors as bytes, in one exchange each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from meshwright.apply.engine import Engine
from meshwright.describe.batches import BatchSplitter, split_samples
from meshwright.errors import ApplyError
from meshwright.run.losses.loss import LossRule
from meshwright.trees import LEAVES, map_tensors, tensors_in, with_attributes

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_MAX_SHOWN = 160
_MOST_TRIED = 8
"""Samples of all ranks in a trial where shares are small [count]."""
_PLAIN = {"dict": dict, "list": list, "tuple": tuple}
"""Containers that a rank can build which has never had a sample."""
_FIX = "batch=whole in the plan, and the whole batch on every rank"
_KEEPS_TIME = (
    "where the loss alone compares samples, a loop of your own with the loss over mw.gather_batch(outputs, model) keeps dp's "
    "time"
)


class JoinedShares:
    """Joins the shares that dp ranks are given.

    Args:
        engine: The strategy.
        splitter: How batches are counted and cut.
        rule: The loss, which knows why parts of a batch are refused.
        is_allowed: Whether the plan leaves the choice, and would cut a whole batch no further.
        most: Samples above which the plan cuts a share into micro-batches; such shares of a first batch are not joined [samples].
    """

    def __init__(
        self, engine: Engine, splitter: BatchSplitter, rule: LossRule, *, is_allowed: bool, most: int | None = None
    ) -> None:
        self._engine, self._splitter, self._rule = engine, splitter, rule
        self._is_allowed, self._most = is_allowed, most
        self._could_not = False
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

        All ask for some samples of each rank, since a share may lack what the batch has: two samples of one class.
        """

        def join(share: Any = batch) -> tuple[Any, list[int]] | None:
            joined, obstacle, counts = self._join(share)
            return None if obstacle else (joined, counts)

        is_possible = self._is_allowed and not self._engine.takes_whole_batch and not self._could_not
        has_others = self._engine.num_shares > 1 and self._splitter.splits_by_row
        self._rule.join = join if is_possible else None
        self._rule.join_some = (lambda: join(self._some_of(batch))) if has_others else None
        try:
            yield
        finally:
            self._rule.join = self._rule.join_some = None

    def after(self, error: ApplyError, batch: Any) -> Any:
        """Have ranks take whole batches from now on, and return this one whole; every rank calls it.

        Where shares cannot be joined, and parts are not known to fail or are to be compared even so, ranks go on with shares.

        Args:
            error: What has refused the first batch's parts.
            batch: This rank's share of it.

        Raises:
            ApplyError: `error` itself, where it was something else, or whole batches do not help.
        """
        engine, rule = self._engine, self._rule
        if error is not rule.refusal or not self._is_allowed or engine.takes_whole_batch:
            raise error
        joined, obstacle, _ = self._join(batch)
        self._could_not = bool(obstacle)
        if obstacle and (rule.is_in_doubt or not rule.refuses):
            return batch
        if obstacle:
            error.add_note(f"ranks could not join their shares to a whole batch by themselves: {obstacle}")
            raise error
        rule.norms = None  # a layer that sees all samples needs no other rank's
        engine.takes_whole_batch, engine.joins_shares = True, error.message
        if engine.everyone.group_rank == 0:
            fix = "" if error.fix is None else f"; batch=split refuses the model instead, with this fix: {error.fix}"
            _LOG.warning("%s%s; %s", engine.batch_reasons[0], fix, _KEEPS_TIME)
        return joined

    def find_own_loop(self) -> ApplyError | None:
        """Return the error of an own loop where ranks join their shares in steps, or None."""
        if not self._engine.joins_shares:
            return None
        return ApplyError(
            "an own loop follows a step whose ranks have joined their shares of the batch, and in an own loop each rank would "
            f"go on with its share. They have joined them since {self._engine.joins_shares}",
            fix=_FIX,
        )

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

    def _join(self, batch: Any) -> tuple[Any, str, list[int]]:
        """Return all ranks' shares as one batch, or why there is none, and the samples of each; the same on every rank."""
        group, everyone = self._engine.group, self._engine.everyone
        device = group.message_device(self._engine.device)
        with group.ledger.of_checks():
            told = group.all_gather_json(self._told(batch), device=device)
            obstacles = everyone.all_gather_json(_obstacle(told, group.ranks), device=device)
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
            form = _form_of(batch, count)
        except ApplyError as error:
            return {"count": count, "obstacle": error.message}
        self._last = form, map_tensors(batch, lambda tensor: tensor[:0].clone() if tensor.dim() else tensor)
        return {"count": count, "form": form, "first": _first_places(batch)}

    def _example(self, form: Any) -> Any:
        """Return a batch without samples of a form."""
        return self._last[1] if self._last is not None and self._last[0] == form else _built(form)


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


# -- forms ----------------------------------------------------------------------------------------------------------------


def _form_of(tree: Any, count: int) -> list[Any]:
    """Return the form of a batch of so many samples as JSON, numbers without dims among it: [kind, ...].

    Raises:
        ApplyError: It holds what cannot be joined.
    """
    if isinstance(tree, torch.Tensor):
        return _form_of_tensor(tree)
    if isinstance(tree, Mapping):
        return ["mapping", _class_name(tree), [[_key(key), _form_of(value, count)] for key, value in tree.items()]]
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        items = [_form_of(item, count) for item in tree]
        if isinstance(tree, list) and len(tree) == count and all(kind == "value" for kind, *_ in items):
            raise ApplyError(
                f"a batch of {count} samples holds a list of {count} numbers or texts, which may be one a sample"
            )
        return ["items", _class_name(tree), items]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return ["mapping", _class_name(tree), [[name, _form_of(getattr(tree, name), count)] for name in names]]
    if type(tree) not in LEAVES:
        raise ApplyError(f"a batch holds a {type(tree).__name__}")
    return ["value", _class_name(tree), tree if type(tree) in (int, float, bool, str, type(None)) else repr(tree)]


def _form_of_tensor(tensor: torch.Tensor) -> list[Any]:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_nested:
        raise ApplyError(f"a batch holds a tensor of another kind ({type(tensor).__name__}, {tensor.layout})")
    if tensor.requires_grad:
        raise ApplyError("a tensor of a batch requires a gradient, which would not reach the rank that has given it")
    kind = str(tensor.dtype).removeprefix("torch.")
    return ["rows", kind, list(tensor.shape[1:])] if tensor.dim() else ["number", kind, repr(tensor.item())]


def _class_name(tree: Any) -> str:
    return f"{type(tree).__module__}.{type(tree).__qualname__}".removeprefix("builtins.")


def _key(key: Any) -> Any:
    if type(key) not in (str, int, bool, type(None)):
        raise ApplyError(f"a batch has a key of class {type(key).__name__}")
    return key


def _obstacle(told: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Return why shares of these forms cannot be joined, or nothing."""
    for rank, row in zip(ranks, told, strict=True):
        if "obstacle" in row:
            return f"{row['obstacle']} (rank {rank})"
    full = [(rank, row["form"]) for rank, row in zip(ranks, told, strict=True) if row["count"]]
    if not full:
        return "no rank has a sample"
    first, form = full[0]
    for rank, other in full:
        if other != form:
            shown = [json.dumps(each)[:_MAX_SHOWN] for each in _first_difference(form, other)]
            return f"ranks {first} and {rank} have batches of other forms, {shown[0]} and {shown[1]}"
    for rank, row in zip(ranks, told, strict=True):
        if not row["count"] and row["form"] != form and (strange := _strange_class(form)):
            return f"rank {rank} has no sample, and cannot make a {strange} by itself"
    return ""


def _first_difference(form: list[Any], other: list[Any]) -> tuple[Any, Any]:
    """Return the smallest parts in which two forms differ first."""
    alike = form[:2] == other[:2] and form[0] in ("mapping", "items") and len(form[2]) == len(other[2])
    pairs = zip(form[2], other[2], strict=True) if alike else ()
    for one, two in pairs:
        if one != two:
            if form[0] == "items":
                return _first_difference(one, two)
            return _first_difference(one[1], two[1]) if one[0] == two[0] else (one[0], two[0])
    return form, other


def _strange_class(form: list[Any]) -> str:
    """Return a class in a form that only a rank with a sample can make, or nothing."""
    kind, name, held = form
    if kind == "value":
        return "" if held is None or name in ("int", "float", "bool", "str") else name
    if kind not in ("mapping", "items"):
        return ""
    inside = [entry[1] for entry in held] if kind == "mapping" else held
    return "" if name in _PLAIN and not any(map(_strange_class, inside)) else name


def _built(form: list[Any]) -> Any:
    """Return a batch without samples of a form that has no strange classes."""
    kind, name, held = form
    if kind == "value":
        return held
    if kind == "number":
        dtype = getattr(torch, name)
        read = complex if dtype.is_complex else float if dtype.is_floating_point else int
        return torch.tensor(held == "True" if dtype == torch.bool else read(held), dtype=dtype)
    if kind == "rows":
        return torch.zeros((0, *held), dtype=getattr(torch, name))
    return _PLAIN[name]([(key, _built(inside)) for key, inside in held] if kind == "mapping" else map(_built, held))


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
