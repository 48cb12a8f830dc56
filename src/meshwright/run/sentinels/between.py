"""Differences between ranks in what a script sets on modules between steps: a rate of dropout, an epsilon, a flag, a hook.

Numbers of torch's own layers decide results, so ranks that differ are refused. Attributes of the user's own classes may be
notes of a rank's share (the last loss), and hooks may only look on (a logger on rank 0), so these are told; so is what
containers and variables hold (`insides.py`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from meshwright._torch_private import GLOBAL_MODULE_HOOKS
from meshwright.apply.engine import Engine
from meshwright.apply.state.attributes import OF_TORCH
from meshwright.apply.state.hook_tables import is_ours
from meshwright.run.sentinels.digest import digest_text
from meshwright.run.sentinels.insides import InsidesWatch, told_text
from meshwright.run.sentinels.settings import Rows, raise_different

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ABSENT = object()

Slot = tuple[int, str]
"""(number of a module, name of its attribute)."""


class SettingsWatch:
    """Attributes and hooks of modules, as a step, an evaluation or the last look left them.

    A look costs about 0.3 microseconds for each module, and one for each attribute that has changed.

    Args:
        engine: The strategy.
        loss_fn: The loss, or None.
    """

    def __init__(self, engine: Engine, loss_fn: Callable[..., Any] | None = None) -> None:
        self._engine = engine
        self._loss_fn = loss_fn
        self._insides: InsidesWatch | None = None
        self._names: list[str] = []
        self._owners: list[dict[str, Any]] = []
        self._kinds: list[type] = []
        self._is_torchs: list[bool] = []
        self._slots: list[Slot] = []
        self._getters: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], dict[str, Any]]] = []
        self._size = -1
        self._values: list[Any] = []
        self._tables: list[dict[int, Any]] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[int] = []
        self._of_user: dict[str, int] = {}  # those that the model was built with are on every rank
        self._passed_over: set[str] = set()
        """What was told, and is watched no more."""
        self._is_noted = self._is_of_prepared = False
        self._set: dict[str, Slot] = {}
        self._changed: dict[str, Slot] = {}
        """What the last digest was of, by name."""
        self._inside: dict[str, Callable[[], Any]] = {}
        """The same of what containers and variables hold."""

    def note(self) -> None:
        """Take what modules hold now as known: a step or an evaluation has run their code."""
        self._find_if_new()
        self._values, self._is_noted = self._read(), True
        if self._insides is None:
            self._insides = InsidesWatch(self._engine.module, self._loss_fn)
        self._insides.note(self._slots, self._values, self._name)

    def _find_if_new(self) -> None:
        if self._owners and self._is_of_prepared == self._engine.is_prepared:
            return
        self._is_of_prepared = self._engine.is_prepared  # with its first batch a strategy may replace modules
        self._is_noted, self._hooks, self._insides = False, [], None
        self._find()

    def _find(self) -> None:
        modules = list(self._engine.module.named_modules())
        self._names = [name for name, _ in modules]
        self._owners = [vars(module) for _, module in modules]
        self._kinds = [type(module) for _, module in modules]
        self._is_torchs = [type(module).__module__.startswith("torch.nn.modules.") for _, module in modules]
        self._tables = [own[key] for own in self._owners for key in _TABLES if key in own]
        self._parameters = list(self._engine.module.named_parameters())
        self._find_slots()

    def _find_slots(self) -> None:
        self._slots, self._getters, self._size = [], [], sum(map(len, self._owners))
        for number, own in enumerate(self._owners):
            keys = [key for key in own if key not in OF_TORCH and key != "training"]
            self._slots += [(number, key) for key in keys]
            if keys:  # with the last one twice, since a getter of one key gives no tuple
                self._getters.append((operator.itemgetter(*keys, keys[-1]), own))
                self._slots.append((number, keys[-1]))

    def _read(self) -> list[Any]:
        if sum(map(len, self._owners)) != self._size:
            self._find_slots()
        try:
            return list(itertools.chain.from_iterable(getter(own) for getter, own in self._getters))
        except KeyError:  # one was deleted, and another one added
            self._find_slots()
            return list(itertools.chain.from_iterable(getter(own) for getter, own in self._getters))

    def _num_hooks(self) -> list[int]:
        of_parameters = [getattr(p, key, None) for _, p in self._parameters for key in _OF_PARAMETERS]
        tables = [*self._tables, *GLOBAL_MODULE_HOOKS]
        return [*map(len, tables), *(len(table) if table else 0 for table in of_parameters)]

    def modes(self) -> str:
        """Return the mode of each module as text, in their order."""
        self._find_if_new()
        return "".join(["1" if own.get("training") else "0" for own in self._owners])

    def look(self) -> None:
        """Remember what was set since `note`; called before modules run again."""
        if not self._is_noted:
            return
        if self._insides is not None:
            self._insides.look()
        slots, before = self._slots, self._values
        self._values = values = self._read()
        if len(values) != len(before) or not all(map(operator.is_, values, before)):
            then, now = dict(zip(slots, before, strict=True)), dict(zip(self._slots, values, strict=True))
            for slot in dict.fromkeys([*then, *now]):
                name = self._name(slot)
                if then.get(slot, _ABSENT) is not now.get(slot, _ABSENT) and name not in self._passed_over:
                    self._set[name] = slot

    def digest(self) -> int:
        """Return a digest of what was set since the last call, equal on ranks that have set the same."""
        self.look()
        self._changed, self._set = self._set, {}
        hooks, self._hooks = self._hooks, self._num_hooks()
        has_new_hooks = hooks != self._hooks and self._has_other_hooks()
        rows = [(name, text) for name, slot in self._changed.items() if (text := self._text(slot)) is not None]
        self._inside = {} if self._insides is None else self._insides.take()
        if self._inside:  # in an order that does not depend on hashes of names
            now = ((name, told_text(value())) for name, value in self._inside.items() if name not in self._passed_over)
            rows += sorted((name, text) for name, text in now if text is not None)
        if not rows and not has_new_hooks:
            return 0
        return digest_text(repr((rows, self._of_user if has_new_hooks else None)))

    def _name(self, slot: Slot) -> str:
        owner = self._names[slot[0]]
        shown = f"module '{owner}'" if owner else "the model itself"
        return f"attribute '{slot[1]}' of {shown}"

    def _text(self, slot: Slot) -> str | None:
        value = self._owners[slot[0]].get(slot[1], _ABSENT)
        return "not there" if value is _ABSENT else told_text(value)

    def _is_option(self, slot: Slot) -> bool:
        """Tell whether an attribute is one by which a layer of torch's computes, and no note that a script keeps there."""
        number, key = slot
        return self._is_torchs[number] and key in _options_of(self._kinds[number])

    def _has_other_hooks(self) -> bool:
        """Tell whether the user's hooks are others than at the last call: those of the package come and go."""
        before, self._of_user = self._of_user, self._user_hooks()
        return before != self._of_user

    def _user_hooks(self, *, with_none: bool = False) -> dict[str, int]:
        """Return how many hooks of the user's modules and parameters have, by name, of all or of those that have any."""
        if "hooks" in self._passed_over:
            return {}
        found: dict[str, int] = {}
        for (name, own), key in itertools.product(zip(self._names, self._owners, strict=True), _TABLES):
            found[f"{name} {key}"] = sum(not is_ours(hook) for hook in own.get(key, {}).values())
        for (name, parameter), key in itertools.product(self._parameters, _OF_PARAMETERS):
            found[f"{name} {key}"] = sum(not is_ours(hook) for hook in (getattr(parameter, key, None) or {}).values())
        for place, table in enumerate(GLOBAL_MODULE_HOOKS):  # those of all modules of the process
            found[f"of all modules, {place}"] = sum(not is_ours(hook) for hook in table.values())
        return {name: count for name, count in found.items() if count or with_none}

    def compare_early(self) -> list[str]:
        """Compare what was set since the plan was applied, before the strategy looks at a first batch; every rank calls it.

        Returns:
            What is told, the same on every rank.

        Raises:
            ApplyError: On every rank, as of `explain`.
        """
        digest = self.digest()
        self._is_noted, self._hooks = False, []  # trials come, and hooks of the plan, which are no script's
        told = self._engine.everyone.all_gather_json(digest, device=self._engine.device)
        return self.explain() if len(set(told)) > 1 else []

    def explain(self) -> list[str]:
        """Find what ranks have set otherwise; every rank calls it after digests have differed.

        Returns:
            What is told, the same on every rank.

        Raises:
            ApplyError: On every rank: a number or a flag of one of torch's layers differs.
        """
        everyone, device = self._engine.everyone, self._engine.device
        mine = [[name, self._is_option(slot)] for name, slot in self._changed.items()]
        mine += [[name, False] for name in sorted(self._inside) if name not in self._passed_over]
        told: Sequence[Any] = everyone.all_gather_json([mine, self._user_hooks(with_none=True)], device=device)
        kinds = {name: is_torchs for changed, _ in told for name, is_torchs in changed}
        refused = [name for name, is_torchs in kinds.items() if is_torchs]
        if refused:
            raise_different(everyone, self._rows(refused), device)
        texts = []
        ours = [name for name in kinds if name not in refused]
        rows: Sequence[Any] = everyone.all_gather_json(self._rows(ours), device=device) if ours else []
        for place, name in enumerate(ours):
            said = [theirs[place][1] for theirs in rows]
            odd = next((rank for rank, text in enumerate(said) if text != said[0]), None)
            if odd is not None:
                ranks = everyone.ranks[0], everyone.ranks[odd]
                texts.append(
                    f"{name} was changed between steps: it is {said[0][:60]} on rank {ranks[0]} and {said[odd][:60]} on rank "
                    f"{ranks[1]}. Where results depend on it, give every rank the same"
                )
                self._passed_over.add(name)
                if self._insides is not None:
                    self._insides.tell()
        # Where each rank of a pipeline has its own parameters, their hooks are there as well.
        common = [name for name in told[0][1] if all(name in hooks for _, hooks in told)]
        if any(hooks[name] != told[0][1][name] for name in common for _, hooks in told):
            counts = {
                everyone.ranks[place]: sum(hooks[name] for name in common) for place, (_, hooks) in enumerate(told)
            }
            texts.append(
                f"ranks have registered other hooks of modules or gradients (their numbers by rank: {counts}). A hook that "
                "changes results has to be on every rank; one that only looks on may be on one"
            )
            self._passed_over.add("hooks")
        for text in texts if everyone.group_rank == 0 else ():
            _LOG.warning("%s", text)
        return texts

    def _rows(self, names: Sequence[str]) -> Rows:
        slots = {self._name(slot): slot for slot in self._slots}

        def text(name: str) -> str:
            if name in slots:
                return self._text(slots[name]) or "..."
            return "not there" if self._insides is None else self._insides.text(name)

        return [(name, text(name)) for name in names]


@functools.cache
def _options_of(kind: type) -> frozenset[str]:
    """Return the names of attributes that a class of torch's makes of its arguments."""
    arguments = [name for base in kind.__mro__[:-1] for name in inspect.signature(base.__init__).parameters]
    return frozenset([*arguments, *getattr(kind, "__constants__", ())])
