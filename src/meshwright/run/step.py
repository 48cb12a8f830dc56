"""Step: micro-batches, exact weights, reduction, the search for NaN, clipping and the optimizer, in order.

    ranks agree on what they bring ──────┐ (in the background, while forward runs)
    micro-batch 0: forward, backward     │
    ...                                  ▼
    last micro-batch: forward ── losses are summed ─┐ (in the background)
                      backward ── buckets are reduced as they fill
    gradients are whole ── norm ── finite? ── clip ── optimizer ── buffers follow rank 0

Gradients are exactly those of one device. A mean over n of N samples is run backward from (n / N) x loss; N is known before
backward starts. A Loss is run backward from its sum, and the whole gradient is divided by the total weight at the end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.model_guard import ModelGuard, OptimizerGuard
from meshwright.apply.norm import clip_
from meshwright.apply.shards.gradient_hooks import GradientHooks, guard_step_hooks, release_step_hooks
from meshwright.describe.batches import BatchSplitter, count_tokens, model_inputs
from meshwright.errors import ApplyError, ConfigError, CorruptionError, NonFiniteError
from meshwright.run.agreement import Agreement
from meshwright.run.diagnose import diagnose, unchanged_draws
from meshwright.run.draws_of_work import DrawsOfWork
from meshwright.run.first_batch import FirstBatch
from meshwright.run.gate import OptimizerGate
from meshwright.run.global_draws import GlobalDraws
from meshwright.run.joined_shares import JoinedShares
from meshwright.run.losses.loss import Loss, LossRule
from meshwright.run.losses.model_watch import ModelWatch
from meshwright.run.losses.terms import LossTerms
from meshwright.run.optimizer_draws import OptimizerDraws
from meshwright.run.own_draws import OwnDraws
from meshwright.run.put_back import Snapshot, in_eval_mode
from meshwright.run.result import StepResult
from meshwright.run.sentinels.sentinels import Sentinels
from meshwright.run.work import LossWork
from meshwright.trees import move_to

__all__: list[str] = []


class Stepper(FirstBatch):
    """Runs steps on an applied model.

    Args:
        engine: The strategy.
        rule: How losses are read.
        splitter: How batches are counted and cut.
        optimizer: What updates the parameters, or None to stop at the gradients.
        micro_batches: Parts that a share is cut into [count].
        micro_batch_size: The most samples that one part may have; more parts are cut where it is exceeded.
        autocast: The dtype that forward runs in, or None for the model's own.
        max_grad_norm: Global norm to clip to, or None.
        non_finite: "stop" raises NonFiniteError before the optimizer; "skip" leaves the step out.
        sentinels: What compares the ranks with each other.
        gate: What lets the optimizer step here alone; None where it may step anywhere.
        draws: Random numbers of forwards that do not depend on the layout; None: torch's generators.
        may_join: Whether ranks may join their shares to whole batches, of which nothing is cut.
        may_join_parts: Whether micro-batches may be joined as well: a pipeline has them for its speed, others for memory.
    """

    def __init__(
        self,
        engine: Engine,
        rule: LossRule,
        splitter: BatchSplitter,
        *,
        optimizer: torch.optim.Optimizer | None,
        micro_batches: int,
        micro_batch_size: int | None,
        autocast: torch.dtype | None,
        max_grad_norm: float | None,
        non_finite: str,
        sentinels: Sentinels,
        gate: OptimizerGate | None = None,
        draws: GlobalDraws | None = None,
        may_join: bool = False,
        may_join_parts: bool = False,
    ) -> None:
        self.engine = engine
        self.rule = rule
        self.splitter = splitter
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.micro_batch_size = micro_batch_size
        self._terms = LossTerms(engine, rule, autocast, splitter, is_cut=self._is_cut)
        self.casts, self._watch_loss = self._terms.casts, self._terms.watch
        self._watch_model = ModelWatch(rule, engine, splitter, draws)
        self.max_grad_norm = max_grad_norm
        self.non_finite = non_finite
        self.sentinels = sentinels
        self._draws = OptimizerDraws(engine)
        self.stop_requested = self._has_looked = self._has_run = False
        self._waiting: list[Callable[[], None]] = []
        self.gate = gate or OptimizerGate(None)
        self.draws = draws
        self.own_draws = OwnDraws(draws, engine, splitter)
        joins_parts = may_join_parts and self._is_cut
        is_allowed = joins_parts or (may_join and micro_batches == 1)
        options = {"is_allowed": is_allowed, "most": micro_batch_size, "joins_parts": joins_parts}

        def cut(batch: Any) -> list[Any]:
            # No method of this, which would hold it: threads of replicas end with their last reference.
            return splitter.micro_batches(move_to(batch, engine.device), micro_batches, micro_batch_size)

        self._shares = JoinedShares(engine, splitter, rule, cut=cut, **options)
        self._watch()

    @property
    def _is_cut(self) -> bool:
        """Whether the plan cuts what a rank takes into micro-batches, or may."""
        return self.micro_batches > 1 or self.micro_batch_size is not None

    def close(self) -> None:
        """Let the optimizer step anywhere, with the user's own hooks."""
        self._hooks.close()
        release_step_hooks(self.optimizer)
        self.gate.close()

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self, batch: Any, *, wants_stop: bool, on_phase: Callable[[str], None]) -> StepResult:
        """Take one optimizer step on this rank's share; every rank calls it, also with None for an empty share."""
        start = time.perf_counter()
        engine = self.engine
        self.gate.has_own_gradients = False
        engine.refuse_lost_writes()
        if engine.joins_shares:  # ranks wait for one another there
            on_phase("shares")
        batch, parts = self._ready(batch)
        weights = [self.rule.known_weight(part) for part in parts]
        self.sentinels.begin_step()
        self._watch_loss.begin(batch, is_due=self.sentinels.is_turn)
        agreement = self._agree(batch, parts, weights, wants_stop=wants_stop)
        self.sentinels.begin_forward()
        snapshot = Snapshot(engine, keep_buffers=self.non_finite == "skip")
        engine.begin_step()
        self._hooks.guard()
        on_phase("forward")
        draws = self._draws_of("step")
        given = (engine, self._terms, agreement, parts, weights)
        work = LossWork(*given, guard=self._guard, on_phase=on_phase, draws=draws)
        with contextlib.nullcontext() if draws is None else draws.running():
            terms = engine.run(work)
        self._guard.take_back()
        sums, norm = work.finish(terms)
        norm_value = norm.item()
        self._report_findings(sums.loss, norm_value)
        skipped = not (math.isfinite(norm_value) and math.isfinite(sums.loss))
        if skipped:
            on_phase("diagnose")
            engine.refuse_taken()
            parts = [micro_batch.batch for micro_batch in work.micro_batches]
            place = (engine, self._terms, parts, snapshot.random_state)
            error = diagnose(*place, loss=sums.loss, norm=norm_value, around=work.around)
            self._leave_out(snapshot, error)
        else:
            self._has_run = self.rule.is_settled
            if self.max_grad_norm is not None:
                clip_(engine.gradient_tensors(), norm, self.max_grad_norm)
            on_phase("optimizer")
            if self.optimizer is not None:
                guard_step_hooks(self.optimizer, engine.switch)
                with engine.group.ledger.span("optimizer", "optimizer"), self.gate.opened(), self._draws.together():
                    self.optimizer.step()
                engine.finish_step()
        if sums.buffers_changed:
            engine.sync_buffers()
        self.stop_requested = agreement.wants_stop
        if self.draws is not None:
            self.draws.share_reasons(is_wanted=agreement.has_news)
        findings = self.sentinels.end_step(sums.loss, norm_value)
        return StepResult(
            loss=sums.loss,
            grad_norm=norm_value,
            num_samples=agreement.num_samples,
            num_tokens=agreement.num_tokens,
            seconds=time.perf_counter() - start,
            skipped=skipped,
            findings=tuple(findings),
        )

    def _report_findings(self, loss: float, norm: float) -> None:
        try:
            self.sentinels.end_backward(loss, norm)
        except CorruptionError:
            self.engine.leave_out_step()
            raise

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's outputs; the strategy may look at the model here first, as at the first batch."""
        self._shares.warn_of_call()
        if self.engine.is_prepared:
            return self.engine.forward(args, kwargs)
        self.refuse_early_change()
        self.own_draws.learn(args, kwargs)
        outputs = self.engine.forward(args, kwargs)
        self.own_draws.learn_cut()
        self.is_now_prepared()
        return outputs

    def forward_in_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `forward` in the dtype of the plan, or of the user's autocast."""
        with self.casts.in_forward(), self.own_draws.without_graph():
            return self.forward(args, kwargs)

    def state_was_loaded(self) -> None:
        """Take note that parameters and the optimizer's state were replaced by our own code, on every rank."""
        self.sentinels.forget_state()
        self.engine.note_buffers()

    def _draws_of(self, kind: str) -> DrawsOfWork | None:
        return None if self.draws is None else DrawsOfWork(self.draws, kind, self.splitter)

    def _watch(self) -> None:
        engine = self.engine
        cuts = self._is_cut or engine.num_shares * engine.num_replicas > 1
        facts = {"fixes_memory": engine.fixes_memory, "cuts_batch": cuts}
        self._guard = ModelGuard(engine.module, follows_calls=engine.holds_parts or engine.copies > 1, **facts)
        self._optimizer_guard = OptimizerGuard(self.optimizer, engine)
        engine.guard_parts()
        self._hooks = GradientHooks.of(engine, accumulates=self._is_cut)

    def _agree(
        self, batch: Any, parts: list[Any], weights: list[float], *, wants_stop: bool, is_step: bool = True
    ) -> Agreement:
        broken = self._guard.find_change() or self._optimizer_guard.find_change() or self.rule.find_uneven(parts)
        self._watch_model.begin(is_step=is_step and self.sentinels.is_enabled)
        if broken is None and self._watch_loss.is_cut:
            broken = self._watch_model.find_mixing(parts)
        may_try = self._watch_loss.is_cut and self._watch_model.is_joint
        switched = self._guard.find_switched() if broken is None else None
        counts = [self.splitter.count(part) for part in parts]
        moved = self.engine.buffers_changed()
        has_places = self.draws is not None and self.draws.has_places
        waits = self.engine.everyone.shares_memory or self.engine.agrees_first or self.rule.exchanges_in_forward
        knows_first = waits or may_try or self.sentinels.needs_agreement_first or has_places
        agreement = Agreement(
            self.engine.everyone,
            self.engine.device,
            known_weight=sum(weights),
            num_samples=sum(counts),
            num_tokens=sum(count_tokens(part, count) for part, count in zip(parts, counts, strict=True)),
            wants_stop=wants_stop,
            switched=switched,
            broken=broken,
            num_passes=len(parts) if self.engine.needs_lockstep else None,
            readers=self.engine.readers,
            sayings=self.sentinels.sayings(batch, self.casts.dtype),
            on_difference=self.sentinels.explain,
            held=self.engine.trainable_states,
            moved=moved,
            knows_first=knows_first,
            has_changed=may_try and self._watch_model.has_changed(parts),
            has_news=self.draws is not None and self.draws.has_news,
            share=(self.engine.share, self.engine.num_shares) if has_places else None,
        )
        if (knows_first or moved) and agreement.buffers_moved:
            self.engine.sync_buffers()
        # A rank that does not hold a parameter hears of its switch from the others.
        may_be_told = switched is not None or knows_first
        if broken is not None or (may_be_told and agreement.trainable_changed):
            agreement.wait()
            self.accept_switched()
        if may_try and (agreement.has_changed or self._watch_model.is_due):
            self._watch_model.refuse_mixing(parts, has_changed=agreement.has_changed)
        return agreement

    # -- own loops ------------------------------------------------------------------------------------------------

    def own_loss(self, batch: Any, forward: Callable[..., Any], *, step: int) -> Loss:
        """Return the loss of this rank's share with what it counts; `forward(args, kwargs, draws=...)` runs the model."""
        if not self.splitter.count(batch):
            raise ConfigError(
                "model.loss() was given a share without samples",
                fix="give every rank of an own loop at least one sample, or use model.step(batch)",
            )
        if (error := self._shares.find_own_loop()) is not None:
            raise error
        part = move_to(batch, self.engine.device)
        self._prepare([part])
        weight = self.rule.known_weight(part)
        self._watch_loss.begin(batch, is_due=False)
        with self.own_draws.forward(self.splitter.count(part), step=step, batch=part) as draws:
            outputs = forward(*model_inputs(part), draws=draws)
            with self.engine.switch.user_code(), self._terms.autocast():
                term = self._terms.empty(outputs) if not weight else self.rule.term(outputs, part, weight)
                with self.engine.group.ledger.of_checks():
                    self._watch_loss.look(outputs, part)
        if self._watch_loss.failure is not None:
            raise self._watch_loss.failure
        self._has_run = True
        return Loss(term.value * term.weight if term.is_mean else term.value, term.weight)

    def find_change(self) -> ApplyError | None:
        """Return why this rank's model or optimizer cannot be trained, or None."""
        return self._shares.find_own_loop() or self._guard.find_change() or self._optimizer_guard.find_change()

    def find_switched(self) -> str | None:
        """Return a parameter whose `requires_grad` was switched since it was last accepted, or None."""
        return self._guard.find_switched()

    def guard_hooks(self) -> None:
        """Guard the user's hooks on gradients that were registered since the last step."""
        self._hooks.guard()

    def common_draws(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the optimizer draws alike on all ranks."""
        return self._draws.together()

    # -- what is not finite -------------------------------------------------------------------------------------

    def _leave_out(self, snapshot: Snapshot, error: NonFiniteError) -> None:
        self.engine.leave_out_step()
        if self.non_finite != "skip":
            raise error
        snapshot.restore_buffers()
        for parameter in self.engine.parameters:
            parameter.grad = None

    # -- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Return loss and counts of a global batch without training on it; every rank calls it."""
        engine = self.engine
        batch, parts = self._ready(batch, evaluates=True)
        with in_eval_mode(engine):
            weights = [self.rule.known_weight(part) for part in parts]
            self._watch_loss.begin(batch, is_due=False)
            agreement = self._agree(batch, parts, weights, wants_stop=False, is_step=False)
            with torch.no_grad(), unchanged_draws(engine):
                draws = self._draws_of("evaluate")
                work = LossWork(engine, self._terms, agreement, parts, weights, draws=draws)
                engine.begin_forward()
                with contextlib.nullcontext() if draws is None else draws.running():
                    terms = engine.run(work)
                try:
                    sums = work.sums(terms)
                finally:  # where nothing counts, every rank raises
                    engine.end_forward()
                self._has_run = self._has_run or self.rule.is_settled
                if sums.buffers_changed:
                    engine.sync_buffers()
            self.sentinels.end_draws()
        return {
            "loss": sums.loss,
            "weight": sums.weight,
            "num_samples": agreement.num_samples,
            "num_tokens": agreement.num_tokens,
        }
