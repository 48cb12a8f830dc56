"""Trial forwards of a model without pipeline stages, on one rank alone or on all ranks together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.state.kept_parameters import KeptParameters
from meshwright.apply.tensor.engine import TensorEngine
from meshwright.describe.batches import call_model
from meshwright.errors import LostPeerError
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.pipeline_trials import told_by_any
from meshwright.run.losses.trials import Evidence, TrialForward, TrialOutcome, run_trial

__all__: list[str] = []

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
            wanted = trials.send([_run_kept(module, engine.device, trial, forward, term) for trial in wanted])
        except StopIteration as end:
            return end.value


def _run_kept(
    module: nn.Module, device: torch.device, trial: TrialForward, forward: Callable[[Any], Any], term: _Term
) -> TrialOutcome:
    """Run a trial, and restore the parameters with values on this rank that its forward has written."""
    parameters = KeptParameters(module)
    outcome = run_trial(module, device, trial, forward, term)
    return dataclasses.replace(outcome, written=tuple(parameters.restore()))


def run_in_lockstep(engine: Engine, module: nn.Module, trials: _Trials, term: _Term) -> Evidence | None:
    """Return the result of trials that all ranks run in equal number, or that ranks which share layers run together.

    Args:
        engine: The strategy.
        module: The model.
        trials: What to run, or None where this rank has no samples; the same on ranks that share layers.
        term: (outputs, batch) -> loss.
    """

    def forward(batch: Any) -> Any:
        try:
            return engine.forward_backward(batch, call_model)[0]
        except LostPeerError:
            raise
        except Exception:  # the trial ends with it here, and other ranks have exchanges of this pass to come
            engine.end_failed_pass()
            raise

    found: Evidence | None = None
    wanted = [] if trials is None else next(trials)
    run = (
        run_trial if engine.copies > 1 or engine.holds_parts else _run_kept
    )  # other plans hold parameters whole, all the time
    while True:
        most = max(engine.everyone.all_gather_json(len(wanted), device=engine.device))
        if most == 0:
            return found
        with torch.no_grad():
            engine.begin_forward()
            outcomes = [run(module, engine.device, trial, forward, term) for trial in wanted]
            for _ in range(most - len(wanted)):
                engine.idle_pass()
            engine.end_forward()
        if isinstance(engine, TensorEngine):
            outcomes = told_by_any(outcomes, engine.tp_group, engine.device)
        if trials is not None and wanted:
            try:
                wanted = trials.send(outcomes)
            except StopIteration as end:
                found, wanted = end.value, []
