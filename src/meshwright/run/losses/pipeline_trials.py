"""Trial forwards of a model that stages of a pipeline hold: all its ranks run each of them together."""

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
    """Return what trials show; every rank calls it, and those of one pipeline have the same trials.

    Args:
        engine: The pipeline, which has dealt out the model.
        module: The model.
        trials: What to run, or None where this rank has no samples.
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
        outcomes = told_by_any(outcomes, engine.pipe, engine.device)
        if trials is not None and wanted:
            try:
                wanted = trials.send(outcomes)
            except StopIteration as end:
                found, wanted = end.value, []


def told_by_any(outcomes: list[TrialOutcome], group: Communicator, device: torch.device) -> list[TrialOutcome]:
    """Return outcomes with what any rank has noticed: random numbers, buffers that were written, statistics of the batch.

    Whether Python read a value is left out: what ranks exchange and compare reads some.

    Args:
        outcomes: Of the same trials on every rank.
        group: The ranks that ran them together.
        device: Where this travels.
    """
    told = group.all_gather_json([outcome.obstacle for outcome in outcomes], device=device)
    return [
        dataclasses.replace(
            outcome, obstacle=next((row[place] for row in told if row[place] is not None), None), branches=False
        )
        for place, outcome in enumerate(outcomes)
    ]
