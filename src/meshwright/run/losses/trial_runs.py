"""Trial forwards of a model: on one rank alone, or on the ranks together that a forward takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.assigned import assigned_parameters
from meshwright.apply.state.kept_parameters import KeptParameters, is_kept
from meshwright.comm.communicator import Communicator
from meshwright.describe.batches import call_model
from meshwright.errors import MeshwrightError
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.trial_forward import RAISED, TrialForward, TrialOutcome, run_trial
from meshwright.run.losses.trials import Evidence

__all__: list[str] = []

_T = TypeVar("_T")
_Trials = Generator[list[TrialForward], list[TrialOutcome], Evidence] | None
_Term = Callable[[Any, Any], LossTerm]


def run_alone(engine: Engine, module: nn.Module, trials: _Trials, term: _Term) -> Evidence | None:
    """Return the result of trials that need no other rank.

    Args:
        engine: The strategy.
        module: The model.
        trials: What to run, or None where this rank has no samples.
        term: (outputs, batch) -> loss.
    """
    if trials is None:
        return None
    forward = functools.partial(call_model, module)
    wanted = next(trials)
    while True:
        try:
            wanted = trials.send([_run_once_more(module, engine.device, trial, forward, term) for trial in wanted])
        except StopIteration as end:
            return end.value


def _run_kept(
    module: nn.Module,
    device: torch.device,
    trial: TrialForward,
    forward: Callable[[Any], Any],
    term: _Term,
    *,
    has_graph: bool = False,
    only: Collection[int] | None = None,
) -> TrialOutcome:
    """Run a trial, and restore the parameters with values on this rank, all or `only` these, that its forward has written."""
    parameters = KeptParameters(module, only)
    outcome = run_trial(module, device, trial, forward, term, has_graph=has_graph)
    written = tuple(parameters.restore())
    left = frozenset(name for name, value in written if not is_kept(value))
    return dataclasses.replace(outcome, written=written, left=left)


def _run_once_more(
    module: nn.Module, device: torch.device, trial: TrialForward, forward: Callable[[Any], Any], term: _Term
) -> TrialOutcome:
    """Run a trial; where its code raises, run it with a graph, of which a penalty on gradients may be computed inside.

    Raises:
        ApplyError: The code runs backward itself, under a plan that adds up gradients (`meshwright.run.model_backwards`).
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        outcome = _run_kept(module, device, trial, forward, term)
        if outcome.obstacle is None or not outcome.obstacle.startswith(RAISED):
            return outcome
        again = _run_kept(module, device, trial, forward, term, has_graph=True)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return outcome if again.obstacle is not None else again


def run_together(engine: Engine, module: nn.Module, trials: _Trials, term: _Term) -> Evidence | None:
    """Return what trials show where a forward takes several ranks, which share layers, stages or an order of exchanges.

    Every rank calls it, and runs as many forwards as any.

    Args:
        engine: The strategy.
        module: The model.
        trials: What to run, or None where this rank has no samples; the same on ranks that run a forward together.
        term: (outputs, batch) -> loss.
    """
    found: Evidence | None = None
    wanted = [] if trials is None else next(trials)
    # In their places all the time are all parameters, or under ZeRO-3 those that the model's code sets.
    kept = assigned_parameters(module) if engine.puts_aside else None
    while True:
        # With whole parameters each rank runs these by itself, however many it has, once no rank wants one together.
        is_alone = any(trial.slopes or trial.is_wide for trial in wanted)
        own = 0 if is_alone else sum(trial.num_forwards for trial in wanted)
        told = engine.everyone.all_gather_json([own, is_alone], device=engine.device)
        most = max(num for num, _ in told)
        if most == 0 and not any(alone for _, alone in told):
            return found
        if most == 0:
            outcomes = _run_whole(engine, module, wanted, term)
            wanted, found = _sent(trials, wanted, outcomes, found)
            continue
        with torch.no_grad(), engine.trying():
            forward = _CountedForward(engine.try_forward)
            outcomes = []
            for trial in [] if is_alone else wanted:
                due = forward.num + trial.num_forwards
                outcomes.append(_run_kept(module, engine.device, trial, forward, term, only=kept))
                for _ in range(due - forward.num):  # its first one has raised
                    engine.idle_pass()
            for _ in range(most - own):
                _or_raise_own(outcomes, engine.idle_pass)
        if is_alone:
            continue
        for group in engine.forward_groups:
            outcomes = _or_raise_own(outcomes, functools.partial(_told_by_any, outcomes, group, engine.device))
        wanted, found = _sent(trials, wanted, outcomes, found)


def _or_raise_own(outcomes: Sequence[TrialOutcome], exchange: Callable[[], _T]) -> _T:
    """Return what an exchange gives; where the ranks that run a trial with this one are elsewhere, since its code has raised here
    alone, raise that.
    """
    try:
        return exchange()
    except MeshwrightError:
        own = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if own is None or isinstance(own, MeshwrightError):
            raise
    raise own  # outside of the handler: what it follows from is what other ranks are told


def _sent(
    trials: _Trials, wanted: list[TrialForward], outcomes: list[TrialOutcome], found: Evidence | None
) -> tuple[list[TrialForward], Evidence | None]:
    """Return the trials that come next, and what the last ones have shown."""
    if trials is None or not wanted:
        return wanted, found
    try:
        return trials.send(outcomes), found
    except StopIteration as end:
        return [], end.value


class _CountedForward:
    """A forward that counts its calls."""

    def __init__(self, forward: Callable[[Any], Any]) -> None:
        self._forward = forward
        self.num = 0

    def __call__(self, batch: Any) -> Any:
        self.num += 1
        return self._forward(batch)


def _run_whole(engine: Engine, module: nn.Module, wanted: Sequence[TrialForward], term: _Term) -> list[TrialOutcome]:
    """Run trials with gradients, or in float32, on this rank alone, with every parameter whole; every rank calls it."""
    forward = functools.partial(call_model, module)
    with engine.whole_parameters(), engine.switch.plain():
        return [_run_kept(module, engine.device, trial, forward, term) for trial in wanted]


def _told_by_any(outcomes: list[TrialOutcome], group: Communicator, device: torch.device) -> list[TrialOutcome]:
    """Return outcomes that are equal on all ranks of a group: what any rank has noticed, and a loss that any could compute.

    A loss that reads parameters (a penalty) is NaN on a rank that does not hold them. Ranks that took their own numbers would
    go on with other trials. Whether Python read a value is left out: what ranks exchange and compare reads some.

    Args:
        outcomes: Of the same trials on every rank.
        group: The ranks that ran them together.
        device: Where this travels.
    """
    own = [
        [one.obstacle, one.value, one.weight, list(one.parts), _marks_of(one), sorted(one.left), one.is_coarse]
        for one in outcomes
    ]
    told = group.all_gather_json(own, device=device)
    return [_agreed(outcome, [row[place] for row in told]) for place, outcome in enumerate(outcomes)]


def _agreed(outcome: TrialOutcome, rows: Sequence[Any]) -> TrialOutcome:
    obstacle = next((row[0] for row in rows if row[0] is not None), None)
    known = [row for row in rows if row[0] is None and all(map(math.isfinite, row[3] or [row[1]]))]
    _, value, weight, parts, *_ = (known or rows)[0]
    marks: dict[str, list[float]] = {}
    for row in rows:
        for name, numbers in row[4]:
            marks.setdefault(name, []).extend(numbers)
    return dataclasses.replace(
        outcome,
        obstacle=obstacle,
        value=value,
        weight=weight,
        parts=tuple(parts),
        branches=False,
        written=tuple((name, torch.tensor(numbers, dtype=torch.float64)) for name, numbers in marks.items()),
        left=frozenset(name for row in rows for name in row[5]),
        is_coarse=any(row[6] for row in rows),
    )


def _marks_of(outcome: TrialOutcome) -> list[tuple[str, list[float]]]:
    """Return (FQN, numbers that stand for this rank's values) of the parameters that a trial's forward has set."""
    marks: list[tuple[str, list[float]]] = []
    for name, value in outcome.written:
        flat = value.detach().reshape(-1)
        flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
        waves = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device)
        # Of one size each, so that a difference shows beside them; which entry has changed shows as well.
        marks.append(
            (name, [float(flat.norm()), *(float(flat @ (2 + wave(waves))) for wave in (torch.cos, torch.sin))])
        )
    return marks
