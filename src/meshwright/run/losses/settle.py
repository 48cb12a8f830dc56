"""Decision on what a loss counts: made once, on the first batch, by all ranks together. A loss that cannot be cut is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.modules.synced_norms import share_reason
from meshwright.describe.batches import BatchSplitter, model_inputs
from meshwright.errors import ApplyError
from meshwright.run.losses.enough import enough_samples
from meshwright.run.losses.loss import WHOLE_BATCH, LossRule, LossTerm
from meshwright.run.losses.part_errors import class_weights_error, mean_error, sums_error
from meshwright.run.losses.told_evidence import seen_by_all
from meshwright.run.losses.trial_forward import DRAWS, RAISED
from meshwright.run.losses.trial_runs import run_alone, run_together
from meshwright.run.losses.trial_writes import apart_error, refusal_of
from meshwright.run.losses.trials import NOT_FINITE, Evidence, Proofs, examine
from meshwright.run.losses.weights import Counted, Guard
from meshwright.run.losses.widened import has_low
from meshwright.trees import move_to, tensors_in

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_FEW = 2
_MOST_BYTES = 2**31
"""Of parameters whose gradients trials take, on each rank [bytes]."""
_ALIKE = 8.0
"""What fits this many times worse than the best is another thing [ratio]."""
_BRANCHES = (
    "loss: the model's forward branches on values of its batch, and each rank and micro-batch decides by its own samples: what "
    "one device would decide by all of them may differ"
)


def settle_loss(
    rule: LossRule,
    engine: Engine,
    splitter: BatchSplitter,
    parts: Sequence[Any],
    *,
    micro_batches: int | None,
    casts: torch.dtype | None = None,
) -> bool:
    """Find what the loss is a mean over, by forwards of the first batch and of parts of it; every rank calls this.

    Args:
        rule: The loss; takes note of the answer.
        engine: The strategy, before it looks at the model.
        splitter: How batches are counted and cut.
        parts: This rank's micro-batches, perhaps none.
        micro_batches: Parts that a share is cut into; None: as many as its size asks for [count].
        casts: What autocast makes of a step; None: nothing.

    Returns:
        Whether batches are cut. Where no rank has a sample, the rule is not settled: the next batch is tried.

    Raises:
        ApplyError: On every rank: steps would add up losses of parts of a batch, and those do not give the loss of the whole.
    """
    is_cut = engine.num_shares * engine.num_replicas * (micro_batches or _FEW) > 1
    if rule.is_settled:
        return is_cut
    if not is_cut and rule.is_given and not engine.takes_whole_batch:  # whose ranks add up gradients even so
        if parts:
            rule.settle(None)
        return False
    if parts:
        engine.look_at(*model_inputs(parts[0]))  # on what a step brings, and where layers may be moved
    with engine.group.ledger.of_checks():
        evidence = look_at_share(rule, engine, splitter, parts, is_cut=is_cut, casts=casts)
    seen = seen_by_all(engine, evidence)
    if not seen:
        return is_cut
    written = refusal_of([(rank, evidence.written) for rank, evidence in seen])
    if written is not None and is_cut:
        raise written  # of the first batch alone: whole batches from then on would cost much for it
    decision = decide(seen, is_given=rule.is_given)
    if is_cut and decision.error is None:
        decision = _decide_beside_others(rule, engine, splitter, seen, decision, casts=casts)
    refuses = is_cut and rule.matters
    if decision.error is not None and refuses and (rule.asks_for_whole or not decision.is_accepted):
        raise rule.refused(decision.error, is_in_doubt=decision.is_in_doubt)
    kept = next((f"{evidence.kept} (rank {rank})" for rank, evidence in seen if evidence.kept), "")
    if kept and refuses and engine.num_shares * engine.num_replicas > 1:
        raise rule.refused(apart_error(kept))
    _take_note(rule, engine, decision, seen, kept=kept, is_cut=is_cut)
    return is_cut


def _take_note(
    rule: LossRule,
    engine: Engine,
    decision: _Decision,
    seen: Sequence[tuple[int, Evidence]],
    *,
    kept: str,
    is_cut: bool,
) -> None:
    """Settle the rule, with what is to be known of the loss."""
    rule.has_untried_keeping = not all(evidence.tries_keeping and evidence.obstacle is None for _, evidence in seen)
    always_draws = is_cut and bool(seen) and all(evidence.obstacle == DRAWS for _, evidence in seen)
    rule.untried = decision.reasons[0] if always_draws else ""
    reasons = (*decision.reasons, *([str(decision.error)] if decision.error is not None else []))  # with its fix
    if kept:  # as a plain loop over micro-batches has it, which is not one device's
        reasons = (*reasons, f"loss: {kept}")
    untried = next((f"{evidence.untried} (rank {rank})" for rank, evidence in seen if evidence.untried), "")
    if untried:
        reasons = (
            *reasons,
            f"gradients of parts of the first batch could not be compared with those of the whole: {untried}",
        )
    rule.branches = any(evidence.branches for _, evidence in seen)
    if rule.branches:  # said even where this batch shows no difference: another may
        reasons = (*reasons, _BRANCHES)
    of_shares = share_reason(engine.module) if is_cut and rule.norms is None else None
    if of_shares is not None:
        reasons = (*reasons, of_shares)
    rule.size = max((evidence.size for _, evidence in seen), default=0.0)
    rule.settle(decision.counted, guards=decision.guards, reasons=reasons if is_cut else ())
    if is_cut and decision.is_accepted and engine.everyone.group_rank == 0:
        _LOG.warning("%s", decision.error)


# -- the trials -----------------------------------------------------------------------------------------------------------


class _Term:
    """The loss on trial, computed where the outputs are."""

    def __init__(self, rule: LossRule, device: torch.device) -> None:
        self._rule, self._device = rule, device

    def __call__(self, outputs: Any, batch: Any) -> LossTerm:
        first = next(tensors_in(outputs), None)
        if first is not None and first.device != self._device:
            batch = move_to(batch, first.device)
        return self._rule.try_term(outputs, batch, 1.0)

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which calls find what those before them have left."""
        return self._rule.in_turn()


def look_at_share(
    rule: LossRule,
    engine: Engine,
    splitter: BatchSplitter,
    parts: Sequence[Any],
    *,
    is_cut: bool = False,
    counts: Sequence[int] = (),
    casts: torch.dtype | None = None,
    ignores_labels: bool = True,
    is_again: bool = False,
) -> Evidence | None:
    """Return the evidence of this rank's share, or of a batch with parts of `counts` samples; None where there is no sample.

    A look at a later batch, `is_again`, asks by few trials whether parts give the whole's loss as the rule weighs them.
    """
    share = parts[0] if counts else enough_samples(parts, splitter)
    module = _uncompiled(engine.module)
    term, is_small = _Term(rule, engine.device), has_room(engine)
    if not is_again:
        rule.has_untried_slopes = is_cut and not is_small
    # Each rank can run the model alone, or with others' parts of it.
    is_whole = not engine.is_prepared or engine.copies == 1
    are_wanted = is_cut and is_whole and is_small and not (counts or is_again)
    proofs = Proofs(are_wanted=are_wanted, changes=lambda: rule.changes)
    trials = None
    if share is not None:
        digits = {"casts": casts, "is_wide": is_whole and is_small and has_low(engine.parameters, share)}
        options = {"splits_by_row": splitter.splits_by_row, "counts": counts, "proofs": proofs}
        options |= {"ignores_labels": ignores_labels, "weigh": rule.known_weight if is_again else None}
        trials = examine(share, module, splitter, **options, **digits)
    is_noted = not engine.buffers_changed()
    if engine.is_prepared and (engine.needs_lockstep or engine.copies > 1):  # before, every rank has the module whole
        found = run_together(engine, module, trials, term)
    else:
        found = run_alone(engine, module, trials, term)
    if is_noted:
        engine.note_buffers()  # trials have put them back
    if found is None and parts:
        return Evidence(obstacle="the first share has one sample only, and split= cuts batches")
    return None if found is None else dataclasses.replace(found, num_samples=sum(map(splitter.count, parts)))


def _uncompiled(module: nn.Module) -> nn.Module:
    return module.get_submodule("_orig_mod") if type(module).__name__ == "OptimizedModule" else module


def has_room(engine: Engine) -> bool:
    """Tell whether this rank may hold all parameters whole, and gradients by them, for trials."""
    held = sum(parameter.nbytes for parameter in engine.parameters)
    return held * (engine.everyone.size if engine.holds_parts else 1) <= _MOST_BYTES


# -- the decision ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class _Decision:
    counted: Counted | None = None
    guards: tuple[Guard, ...] = ()
    reasons: tuple[str, ...] = ()
    error: ApplyError | None = None
    is_in_doubt: bool = False
    is_accepted: bool = False
    """Whether the error is told alone where ranks do not join their shares: a Loss says what its parts count."""


def decide(seen: Sequence[tuple[int, Evidence]], *, is_given: bool) -> _Decision:
    """Return what the loss counts by all ranks' evidence, which every rank has; so all decide alike."""
    able = [(rank, evidence) for rank, evidence in seen if evidence.obstacle is None]
    if not able:
        why = next((evidence.obstacle for _, evidence in seen), "no rank has a sample")
        return _Decision(
            reasons=(f"loss: whether it is a mean over samples could not be tried out on the first batch: {why}",)
        )
    apart = next(((rank, evidence.apart) for rank, evidence in able if evidence.apart), None)
    if apart is not None:
        return _Decision(error=apart_error(f"{apart[1]} (rank {apart[0]})"))
    unlike = next(((rank, evidence) for rank, evidence in able if evidence.is_apart), None)
    if unlike is not None:
        return _Decision(error=sums_error(*unlike), is_in_doubt=True, is_accepted=True)
    if any(evidence.is_sum for _, evidence in able):
        return _Decision()
    tolerance = max(evidence.tolerance for _, evidence in able)
    candidates = _merge(able)
    plain = {counted: gaps[0] for counted, gaps in candidates.items()}
    fitting = [counted for counted in candidates if plain[counted] <= tolerance]
    if not fitting:
        return _Decision(error=mean_error(able, is_given=is_given))
    proven = {counted: max(candidates[counted]) for counted in fitting if max(candidates[counted]) <= tolerance}
    weighted = next(((rank, evidence) for rank, evidence in able if evidence.has_class_weights), None)
    if weighted is not None and is_given:
        return _Decision(error=class_weights_error(weighted[0]))
    if proven:
        best = min(proven.values())
        alike = [counted for counted, gap in proven.items() if gap <= max(_ALIKE * best, tolerance / 100)]
        counted = min(alike, key=lambda counted: _preference(counted, is_given=is_given))
        by_labels = counted.path is not None and is_given
        reason = f"loss: a mean over the {counted}, found by trying the first batch in parts" if by_labels else ""
        return _Decision(counted=counted, reasons=(reason,) if reason else (), guards=_guards(able, only_untried=True))
    counted = min(fitting, key=lambda counted: _preference(counted, is_given=is_given))
    return _Decision(counted=counted, guards=_guards(able, only_untried=False))


def shows_nothing(seen: Sequence[tuple[int, Evidence]]) -> bool:
    """Tell whether no rank's share has shown what parts give: one sample, losses of 0, or code that failed on some of it."""
    failed = (RAISED, NOT_FINITE)
    return all(
        evidence.num_samples < _FEW or evidence.is_zero
        if evidence.obstacle is None
        else evidence.obstacle.startswith(failed)
        for _, evidence in seen
    )


def _decide_by_shares(
    rule: LossRule,
    engine: Engine,
    splitter: BatchSplitter,
    batch: tuple[Any, list[int]] | None,
    before: _Decision,
    *,
    casts: torch.dtype | None,
) -> _Decision:
    """Return what the first batch of all ranks beside their shares shows, where the shares by themselves do not.

    Args:
        rule: The loss.
        engine: The strategy.
        splitter: How batches are counted and cut.
        batch: All samples, and how many each share has; None where they cannot be joined.
        before: What shares have shown.
        casts: What autocast makes of a step.
    """
    seen = _look_at_all(rule, engine, splitter, batch, casts=casts)
    if not seen:
        return before
    found = decide(seen, is_given=rule.is_given)
    if found.error is not None:
        return found
    failed = next((evidence for _, evidence in seen if evidence.has_whole), None)
    if failed is not None:
        error = ApplyError(
            f"shares of the first batch could not be tried: {failed.obstacle}, and the whole batch has a loss"
        )
        return _Decision(error=error, is_in_doubt=True)
    if all(evidence.is_zero for _, evidence in seen):
        zero = (
            "loss: it is 0 over the whole first batch, so that nothing shows whether parts of a batch give one device's; where "
            f"it compares samples with each other (mined triplets), leave the batch whole: {WHOLE_BATCH}"
        )
        return dataclasses.replace(before, reasons=(*before.reasons, zero))
    return before if any(evidence.obstacle for _, evidence in seen) else found


def _decide_beside_others(
    rule: LossRule,
    engine: Engine,
    splitter: BatchSplitter,
    seen: Sequence[tuple[int, Evidence]],
    before: _Decision,
    *,
    casts: torch.dtype | None,
) -> _Decision:
    """Return what shares have shown together with some samples of all ranks: samples of one class may be on two of them."""
    is_silent = shows_nothing(seen)
    # One rank's share may lack the sample that the model cannot do without: the longest of a padded batch.
    has_raised = any((evidence.obstacle or "").startswith(RAISED) for _, evidence in seen)
    if rule.join is not None and (is_silent or has_raised):
        found = _decide_by_shares(rule, engine, splitter, rule.join(), before, casts=casts)
        if is_silent or found.error is not None:
            return found
    elif is_silent:
        return before
    is_open = any(evidence.obstacle is None for _, evidence in seen)
    some = rule.join_some() if rule.join_some is not None and is_open else None
    beside = _look_at_all(rule, engine, splitter, some, casts=casts, ignores_labels=False)
    return decide([*seen, *beside], is_given=rule.is_given) if beside else before


def _look_at_all(
    rule: LossRule,
    engine: Engine,
    splitter: BatchSplitter,
    batch: tuple[Any, list[int]] | None,
    *,
    casts: torch.dtype | None,
    ignores_labels: bool = True,
) -> list[tuple[int, Evidence]]:
    """Return what samples of several ranks show, with the samples of each rank as a part; nothing where they are not joined."""
    counts = [] if batch is None else [count for count in batch[1] if count]
    if batch is None or len(counts) < _FEW:
        return []
    whole = [move_to(batch[0], engine.device)]
    options = {"counts": counts, "casts": casts, "ignores_labels": ignores_labels}
    with engine.group.ledger.of_checks():
        evidence = look_at_share(rule, engine, splitter, whole, is_cut=True, **options)
    return seen_by_all(engine, evidence)


def _preference(counted: Counted, *, is_given: bool) -> tuple[bool, bool]:
    # Of what fits alike: a user's mean is one over samples, a model's own one over labels.
    return (counted.path is None) is not is_given, counted.shifted


def _merge(able: Sequence[tuple[int, Evidence]]) -> dict[Counted, list[float]]:
    """Return the largest gaps over the ranks, of each candidate that all have: as it is, then with ignored labels."""
    merged: dict[Counted, list[float]] = {}
    for counted, _, _ in able[0][1].gaps:
        rows = [row for _, evidence in able for row in evidence.gaps if row[0] == counted]
        if len(rows) == len(able):
            tried = [gap for _, _, gaps in rows for gap in gaps if gap is not None]
            merged[counted] = [max(gap for _, gap, _ in rows), *tried]
    return merged


def _guards(able: Sequence[tuple[int, Evidence]], *, only_untried: bool) -> tuple[Guard, ...]:
    """Return (path, ignored label, how many of a sample) of labels whose number must stay as it was in the first batch."""
    return tuple(
        (path, value, each) for path, value, each, is_safe in able[0][1].masked if not (only_untried and is_safe)
    )
