"""Watch over a model that the first batch has shown to treat each sample by itself, and that may mix them later."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.modules.hooks import OwnHook
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.run.losses.drawn import Tried, later_error
from meshwright.run.losses.enough import enough_samples
from meshwright.run.losses.loss import LossRule, LossTerm
from meshwright.run.losses.settle import decide, look_at_share
from meshwright.run.losses.told_evidence import seen_by_all
from meshwright.run.losses.trial_writes import refusal_of
from meshwright.run.losses.trials import Evidence
from meshwright.run.losses.watch import is_read_by_losses
from meshwright.run.losses.weights import tensors_by_path

__all__: list[str] = []

_NUMBERS = frozenset({int, float, bool, str})
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, type})
_CONTAINERS = (list, tuple, dict, set, frozenset)
_ENTRIES = frozenset({int, bool, str})
"""Of what a container or an object holds; a float is rather a measurement."""
_LIBRARIES = frozenset({"torch", "numpy", "meshwright", "builtins"}) | sys.stdlib_module_names - {"types", "argparse"}
_DEPTH = 2
_MOST_ENTRIES = 64
"""Of a container or an object that are looked at [count]."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PLAIN = operator.itemgetter("training", *_HOOKS)
_FEW_SAMPLES = 4
"""Samples that a look at a later batch takes [count]."""
_MAX_FORMS = 64
"""Forms of batches after which they are taken to vary freely [count]."""
_MAX_CHANGES = 16
"""Changes of an attribute after which it is taken for a counter, and the model tried at each doubling alone [count]."""


class TriesDraws(Protocol):
    """What tries a model that draws (`run/global_draws.py`)."""

    def try_again(self, share: Any, splitter: BatchSplitter, term: Any, weigh: Any) -> Tried:
        """Return the losses of a share and of its parts; every rank calls it where a forward takes several."""
        ...


class ModelWatch:
    """Repeats the trials of the model on parts of a batch after a module or the form of batches has changed.

    Ranks whose forward takes several of them do it together, where any of them has noticed a change.

    Args:
        rule: The loss.
        engine: The strategy.
        splitter: How batches are counted and cut.
        draws: Tries models that draw while they train; None where torch draws.
    """

    def __init__(
        self, rule: LossRule, engine: Engine, splitter: BatchSplitter, draws: TriesDraws | None = None
    ) -> None:
        self._draws = draws
        self._rule = rule
        self._engine = engine
        self._splitter = splitter
        self._slots: list[tuple[dict[str, Any], list[str]]] = []
        self._plain: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []
        self._num_changes: Counter[int] = Counter()
        self._forms: set[Any] = set()
        self._num_steps = 0
        self.is_due = False
        """Whether the model is tried again in the present step, whatever has changed."""

    def begin(self, *, is_step: bool) -> None:
        """Take note of a step, or of an evaluation; every rank calls it."""
        self._num_steps += is_step
        self.is_due = is_step and _is_due_again(self._num_steps) and not self._rule.branches and self._may_look

    @property
    def _may_look(self) -> bool:
        """Whether a model is tried for a step's number alone.

        Ranks that share layers wait for one another inside of a trial: over shared memory they see that one has raised, and gloo
        and NCCL would have them wait until the limit. Stages refuse what a layer begins to write with a later batch, which they
        would not see any more where a trial has met it first.
        """
        engine = self._engine
        return all(group.axis != "pp" and group.shares_memory_of(engine.device) for group in engine.forward_groups)

    @property
    def is_joint(self) -> bool:
        """Whether a forward takes several ranks, so that none of them can try the model alone."""
        engine = self._engine
        return engine.needs_lockstep or engine.copies > 1

    def find_mixing(self, parts: Sequence[Any]) -> ApplyError | None:
        """Return an error if the model now mixes the samples of this batch; a changed model is tried, or one that is due."""
        engine = self._engine
        if self.is_joint or not ((has_changed := self.has_changed(parts)) or self.is_due):
            return None
        for is_again in self._looks(has_changed=has_changed):
            evidence = self._look(parts, is_again=is_again)
            error = None if evidence is None else self._error_of([(engine.everyone.rank, evidence)])
            if error is not None:
                return error
        return None if self._rule.branches else later_error(self._rule, self._drawn(parts))

    def refuse_mixing(self, parts: Sequence[Any], *, has_changed: bool) -> None:
        """Try a model whose forward takes several ranks; every rank calls it.

        Args:
            parts: This rank's micro-batches, perhaps none.
            has_changed: Whether it has changed on any rank.

        Raises:
            ApplyError: On every rank: the model, as it is now, mixes the samples of this batch.
        """
        engine = self._engine
        for is_again in self._looks(has_changed=has_changed):
            with engine.group.ledger.of_checks():
                seen = seen_by_all(engine, self._look(parts, is_again=is_again))
            error = self._error_of(seen)
            if error is not None:
                raise error
        if self._rule.branches or self._draws is None:
            return
        with engine.group.ledger.of_checks():
            told = engine.everyone.all_gather_json(self._drawn(parts), device=engine.device)
        if (error := next(filter(None, (later_error(self._rule, tried) for tried in told)), None)) is not None:
            raise error

    def _looks(self, *, has_changed: bool) -> list[bool]:
        """Return which looks to take: that of a first batch at what has changed, and that at a later batch."""
        return [*([False] if has_changed else []), *([] if self._rule.branches else [True])]

    def _look(self, parts: Sequence[Any], *, is_again: bool) -> Evidence | None:
        """Return the evidence of these micro-batches, or of a few samples by few trials."""
        few = self._few(parts) if is_again else parts
        with _buffers_as_they_are(self._engine.module):
            return look_at_share(self._rule, self._engine, self._splitter, few, is_cut=True, is_again=is_again)

    def _few(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Return the micro-batch of a few samples that a look at a later batch takes."""
        splitter = self._splitter
        if not (parts and splitter.splits_by_row):
            return parts
        return splitter.cut(parts[0], math.ceil(splitter.count(parts[0]) / _FEW_SAMPLES))[:1]

    def _drawn(self, parts: Sequence[Any]) -> Tried:
        """Return the losses of a few samples and of their parts in training mode, of a model that draws there."""
        rule, splitter = self._rule, self._splitter
        if self._draws is None:
            return None
        share = enough_samples(self._few(parts), splitter)
        with _buffers_as_they_are(self._engine.module):
            return self._draws.try_again(share, splitter, self._term, rule.known_weight)

    def _term(self, outputs: Any, batch: Any) -> LossTerm:
        return self._rule.try_term(outputs, batch, 1.0)

    def _error_of(self, seen: Sequence[tuple[int, Evidence]]) -> ApplyError | None:
        written = refusal_of([(rank, evidence.written) for rank, evidence in seen])
        if written is not None or all(evidence.obstacle is not None for _, evidence in seen):
            return written
        found = decide([(rank, self._scaled(evidence)) for rank, evidence in seen], is_given=self._rule.is_given)
        if (error := found.error) is None or found.is_accepted:
            return None
        text = error.message.replace("the first batch", "this batch")
        return ApplyError(text.replace("over samples:", "over samples, as it was for the first batch:"), fix=error.fix)

    def _scaled(self, evidence: Evidence) -> Evidence:
        """Return evidence that is judged beside the losses of the first batch: of a small loss, roundings are a large part."""
        scale = self._rule.size / evidence.size if evidence.size else 1.0
        return dataclasses.replace(evidence, tolerance=evidence.tolerance * max(1.0, scale))

    def has_changed(self, parts: Sequence[Any]) -> bool:
        """Tell whether a number, a flag, the mode or a hook of a module has changed since the last call, or the form of batches.

        Args:
            parts: This rank's micro-batches, perhaps none.
        """
        is_new = self._has_new_form(parts)
        return self._module_has_changed() or is_new

    def _has_new_form(self, parts: Sequence[Any]) -> bool:
        """Tell whether a batch has other keys, flags or types than those before; sizes may vary freely."""
        if not parts or len(self._forms) >= _MAX_FORMS:
            return False
        form = _form_of(parts[0])
        if not self._rule.is_given:  # another one is looked at with each kind of labels and masks (`LossWatch`)
            read = [tensor for path, tensor in tensors_by_path(parts[0]) if is_read_by_losses(path)]
            form = (form, tuple(map(_are_alike, read)))
        is_new = bool(self._forms) and form not in self._forms
        self._forms.add(form)
        return is_new

    def _module_has_changed(self) -> bool:
        sizes = [len(own) for own, _ in self._slots]
        if (is_first := not self._slots) or sizes != self._sizes:
            left_out = OF_TORCH - set(_HOOKS)
            own = [vars(child) for child in self._engine.module.modules() if not _is_plain(child)]
            self._plain = [vars(child) for child in self._engine.module.modules() if _is_plain(child)]
            self._slots = [(held, [name for name in held if name not in left_out]) for held in own] or [({}, [])]
            self._sizes, self._values = [len(held) for held, _ in self._slots], self._read()
            # The first batch was tried in training mode, and an evaluation may come first.
            return not is_first or not self._engine.module.training
        values, before = self._read(), self._values
        if values == before:
            return False
        self._values = values
        changed = [index for index, pair in enumerate(zip(values, before, strict=True)) if pair[0] != pair[1]]
        self._num_changes.update(changed)
        return any(_is_due(self._num_changes[index]) for index in changed)

    def _read(self) -> list[Any]:
        values = [own.get(name) for own, names in self._slots for name in names]
        values += [value for own in self._plain for value in _OF_PLAIN(own)]
        # Nearly all tables of hooks are empty: this runs in every step, and calls nothing for them.
        held: dict[int, Any] = {}  # a configuration is an attribute of many modules
        # Stages of a pipeline compare what attributes hold in each forward; under tp the guards of proofs do.
        is_alone = self._engine.copies == 1
        return [
            value
            if (kind := type(value)) in _NUMBERS or kind in _FUNCTIONS
            else _held_in(value, held)
            if (value if kind is OrderedDict else is_alone and _is_looked_into(kind))
            else None
            for value in values
        ]


def _held_in(value: Any, held: dict[int, Any], depth: int = _DEPTH) -> Any:
    """Return the numbers, flags and functions that a container or an object holds, by which code may decide.

    Args:
        value: Hooks, a container, or an object such as a configuration.
        held: What was found by id.
        depth: How deep it is looked into.
    """
    kind = type(value)
    if kind is OrderedDict:
        return _users_hooks(value)
    if id(value) not in held:
        parts = value if kind in _CONTAINERS else getattr(value, "__dict__", {})
        entries = list(itertools.islice(parts.items() if isinstance(parts, dict) else enumerate(parts), _MOST_ENTRIES))
        found: list[Any] = []
        for place, entry in entries:
            is_told = (kind := type(entry)) in _ENTRIES or kind in _FUNCTIONS
            if is_told or (depth > 1 and _is_looked_into(kind)):
                name = place if type(place) in _ENTRIES else None
                found.append((name, entry if is_told else _held_in(entry, held, depth - 1)))
        held[id(value)] = found  # not before, since an object may hold itself
    return held[id(value)]


@functools.cache
def _is_looked_into(kind: type) -> bool:
    """Tell whether values of a class may hold by what code decides: containers, and objects of no library."""
    if kind is OrderedDict or kind in _CONTAINERS:
        return True
    return not issubclass(kind, (torch.Tensor, nn.Module)) and kind.__module__.partition(".")[0] not in _LIBRARIES


def _users_hooks(hooks: OrderedDict[Any, Any]) -> tuple[int, ...]:
    """Return the numbers of the user's hooks in a table of them."""
    return tuple(number for number, hook in hooks.items() if isinstance(number, int) and not isinstance(hook, OwnHook))


def _form_of(batch: Any) -> Any:
    """Return the keys, types and numbers of dims of a batch, and its flags."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.dim()
    if isinstance(batch, Mapping):
        return tuple((key, _form_of(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        # A list of texts has one for each sample, and others in every batch.
        return type(batch) if all(isinstance(item, str) for item in batch) else tuple(map(_form_of, batch))
    return batch if isinstance(batch, (bool, str)) or batch is None else type(batch)


def _are_alike(tensor: torch.Tensor) -> bool:
    """Tell whether all entries are equal, as of a mask without padding."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and (not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all()))


@contextlib.contextmanager
def _buffers_as_they_are(module: nn.Module) -> Iterator[None]:
    """Remove the buffers that code registers inside the context: a step is to see that it does so first."""
    before = [(child._buffers, set(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for table, names in before:
            for name in table.keys() - names:
                del table[name]


def _is_due_again(num_steps: int) -> bool:
    """Tell whether a model is tried in a step for its number alone: 2, 8, 32, 128 and so on."""
    return num_steps > 1 and num_steps.bit_count() == 1 and num_steps.bit_length() % 2 == 0


def _is_due(num_changes: int) -> bool:
    return num_changes <= _MAX_CHANGES or num_changes.bit_count() == 1


def _is_plain(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and vars(module).keys() >= {"training", *_HOOKS}
