"""Trial forwards of a model whose layers lie on pipeline stages: all ranks of the pipeline run each one together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.comm.communicator import Communicator
from meshwright.describe.batches import model_inputs
from meshwright.run.losses.loss import LossTerm
from meshwright.run.losses.trials import Evidence, TrialForward, TrialOutcome, run_trial

__all__: list[str] = []


def run_in_pipeline(
    engine: PipelineEngine,
    module: nn.Module,
    trials: Generator[list[TrialForward], list[TrialOutcome], Evidence] | None,
    term: Callable[[Any, Any], LossTerm],
) -> Evidence | None:
    """Return the result of trials; every rank calls it, and ranks of one pipeline have the same trials.

    Args:
        engine: The pipeline's engine, prepared.
        module: The model.
        trials: The trials, or None where this rank has no samples.
        term: (outputs, batch) -> loss.
    """

    def forward(batch: Any) -> Any:
        return engine.forward(*model_inputs(batch))

    found: Evidence | None = None
    wanted = [] if trials is None else next(trials)
    while True:
        most = max(engine.everyone.all_gather_json(len(wanted), device=engine.device))
        if most == 0:
            return found
        outcomes: list[TrialOutcome] = []
        with torch.no_grad():
            for place in range(most):
                if place < len(wanted):
                    outcomes.append(run_trial(module, engine.device, wanted[place], forward, term))
                else:
                    engine.begin_forward()
                    engine.end_forward()
        outcomes = told_by_any(outcomes, engine.pp_group, engine.device)
        if trials is not None and wanted:
            try:
                wanted = trials.send(outcomes)
            except StopIteration as end:
                found, wanted = end.value, []


def told_by_any(outcomes: list[TrialOutcome], group: Communicator, device: torch.device) -> list[TrialOutcome]:
    """Return outcomes with the flags of all ranks: random draws, written buffers, batch statistics.

    The flag for values read by Python is left out, since the ranks' own exchanges read some.

    Args:
        outcomes: Of the same trials on every rank.
        group: The ranks that ran them together.
        device: The device of the exchange.
    """
    told = group.all_gather_json([outcome.obstacle for outcome in outcomes], device=device)
    return [
        dataclasses.replace(
            outcome, obstacle=next((row[place] for row in told if row[place] is not None), None), branches=False
        )
        for place, outcome in enumerate(outcomes)
    ]
