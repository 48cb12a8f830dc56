"""The first batch: trials of the loss and of what draws, the strategy's look at the model, and joined shares where parts fail."""

from __future__ import annotations

import abc
from collections.abc import Callable, Set
from typing import Any

from meshwright.apply.engine import Engine
from meshwright.apply.model_guard import ModelGuard
from meshwright.apply.state.settling import made_parameter_error
from meshwright.describe.batches import BatchSplitter
from meshwright.errors import ApplyError
from meshwright.ranks.allocator import memory_returned
from meshwright.run.agreement import raise_first, refuse_switched, told_of
from meshwright.run.autocast import Autocast
from meshwright.run.diagnose import unchanged_draws
from meshwright.run.global_draws import GlobalDraws
from meshwright.run.joined_shares import JoinedShares
from meshwright.run.losses.drawn import learn_draws
from meshwright.run.losses.loss import LossRule, LossTerm
from meshwright.run.losses.settle import settle_loss
from meshwright.run.losses.terms import LossTerms
from meshwright.run.losses.watch import LossWatch
from meshwright.run.put_back import in_training_mode
from meshwright.run.sentinels.sentinels import Sentinels
from meshwright.run.structure import settle_structure
from meshwright.trees import move_to

__all__: list[str] = []


class FirstBatch(abc.ABC):
    """What a stepper does before its first step, and looks up in each later one."""

    engine: Engine
    rule: LossRule
    splitter: BatchSplitter
    sentinels: Sentinels
    draws: GlobalDraws | None
    casts: Autocast
    micro_batches: int
    micro_batch_size: int | None
    _terms: LossTerms
    _watch_loss: LossWatch
    _guard: ModelGuard
    _shares: JoinedShares
    _waiting: list[Callable[[], None]]
    _has_looked: bool
    _has_run: bool
    """Whether a step or an evaluation has given a finite loss since the first look, or an example was looked at."""

    @abc.abstractmethod
    def _watch(self) -> None:
        """Guard the model, its optimizer and its hooks as they are now."""

    def accept_switched(self) -> None:
        """Follow a change of `requires_grad`, made on every rank."""
        self._guard.accept_trainable()
        self.engine.refresh_trainable()

    def prepare(self, batch: Any) -> None:
        """Let the strategy look at a batch before training begins; every rank calls it, with a share or None."""
        with self.engine.at_work():
            self._ready(batch, is_example=True)
        self._has_run = True

    def when_prepared(self, run: Callable[[], None]) -> None:
        """Run something once the strategy has looked at its first batch."""
        self._waiting.append(run)

    @property
    def is_waiting(self) -> bool:
        """Whether `when_prepared` has anything left to run."""
        return bool(self._waiting)

    def refuse_early_change(self) -> None:
        """Refuse, on every rank, a model that was changed since the plan was applied, before it is looked at."""
        engine, broken, switched = self.engine, self._guard.find_change(), self._guard.find_switched()
        everyone, mine = engine.everyone, [told_of(broken), switched is not None]
        rows = everyone.all_gather_json(mine, device=engine.device)
        raise_first([told for told, _ in rows], broken, everyone.ranks)
        # What guards the model from its first batch on takes it as it is.
        if any(is_switched for _, is_switched in rows):
            refuse_switched(everyone, engine.device, switched, lambda: _states_of(engine))
        self.sentinels.compare_early()

    def _ready(self, batch: Any, *, evaluates: bool = False, is_example: bool = False) -> tuple[Any, list[Any]]:
        """Return the batch that this rank takes, and its micro-batches, once the strategy has looked at a first one."""
        if self._has_looked and not self._has_run:  # at a batch that no step could take: it has shown nothing of others
            self._shares.forget_obstacle()
            self._begin_again(None)
        if not (is_example or self._has_looked):
            self.sentinels.compare_first(batch)
        batch = self._shares.of_step(batch)
        parts = self._micro_batches(batch)
        try:
            with self._shares.in_reserve(batch):
                self._prepare(parts, evaluates=evaluates)
        except ApplyError as error:
            share, batch = batch, self._shares.after(error, batch)
        else:
            return batch, parts
        self._begin_again(None if is_example else share)
        parts = self._micro_batches(batch)
        self._prepare(parts, evaluates=evaluates)
        self.sentinels.give_back_draws()
        return batch, parts

    def _begin_again(self, share: Any) -> None:
        """Forget what parts of the first batch have shown.

        Args:
            share: What this rank was given of it, to be compared with the others'; an example is one and the same on all ranks.
        """
        self.refuse_early_change()
        if self.engine.is_prepared and self._guard.find_switched() is not None:
            self.accept_switched()
        self._has_looked = self.rule.is_settled = False
        if self.draws is not None:
            self.draws.forget()
        if self.engine.joins_shares or self.engine.joins_micro_batches:
            self.micro_batches, self.micro_batch_size = 1, None  # a whole batch is not cut
        if self.engine.joins_shares:
            self.sentinels.take_whole_batches(share)
        self._watch()

    def _prepare(self, parts: list[Any], *, evaluates: bool = False) -> None:
        is_prepared, is_first, self._has_looked = self.engine.is_prepared, not self._has_looked, True
        if is_prepared and not is_first:
            self._settle_loss(parts)
            return
        self.refuse_early_change()
        first_run = self._terms.first_run(parts[0], evaluates=evaluates) if parts else None
        names = _names_in(self.engine)
        with memory_returned():
            if settle_structure(self.engine, first_run, lambda: self._settle_loss(parts)):
                self._watch()
                names = _names_in(self.engine)
            if is_prepared:
                return
            # An evaluation may come first, and what draws, draws while it trains; the look draws nothing of the training's.
            with in_training_mode(self.engine), unchanged_draws(self.engine), self.casts.left_out():
                self.engine.prepare(first_run)
                if self.draws is not None:
                    self.draws.learn_cut(self.splitter, self._try_term)
            _refuse_new(self.engine, names)
            self.is_now_prepared()

    def _micro_batches(self, batch: Any) -> list[Any]:
        batch = move_to(batch, self.engine.device)
        return self.splitter.micro_batches(batch, self.micro_batches, self.micro_batch_size)

    def _try_term(self, outputs: Any, batch: Any) -> LossTerm:
        return self.rule.try_term(outputs, batch, 1.0)

    def _settle_loss(self, parts: list[Any]) -> None:
        options = {"micro_batches": None if self.micro_batch_size else self.micro_batches, "casts": self.casts.dtype}
        is_cut = settle_loss(self.rule, self.engine, self.splitter, parts, **options)
        self._watch_loss.is_cut = is_cut and self.rule.refuses
        if self.draws is not None and not self.draws.is_known and self.rule.is_settled:
            learn_draws(self.draws, self.rule, parts, self.splitter, self._try_term, is_cut=is_cut)

    def is_now_prepared(self) -> None:
        """Take note that the strategy has looked at a first batch."""
        self._watch()  # a strategy may have taken parameters out
        while self._waiting:
            self._waiting.pop()()


def _names_in(engine: Engine) -> frozenset[str]:
    return frozenset(name for name, _ in engine.module.named_parameters(remove_duplicate=False))


def _refuse_new(engine: Engine, names: Set[str]) -> None:
    """Refuse, on every rank, parameters that the first forward has made: the optimizer is older, and does not train them.

    Args:
        engine: The strategy, which has run the model's forward.
        names: FQNs from before.

    Raises:
        ApplyError: On every rank: there are others now.
    """
    named = list(engine.module.named_parameters(remove_duplicate=False))
    # Another name of one that was there is refused as such.
    known = {id(parameter) for name, parameter in named if name in names}
    new = sorted(name for name, parameter in named if name not in names and id(parameter) not in known)
    found = next(filter(None, engine.everyone.all_gather_json(new, device=engine.device)), None)
    if found:
        raise made_parameter_error(found[0], "no optimizer would train it")


def _states_of(engine: Engine) -> dict[str, bool]:
    """Return `requires_grad` by FQN of what this rank holds, of all parameters before the strategy has looked at the model."""
    if engine.is_prepared:
        return engine.trainable_states()
    return {name: parameter.requires_grad for name, parameter in engine.module.named_parameters()}
