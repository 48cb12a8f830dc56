"""First forward of a pipeline, seen by one rank for all: the calls that are dealt out to stages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from meshwright.apply.first_look import begins_in_eval_mode, on_all_samples, tell_everyone
from meshwright.apply.pipeline.tracing.call_trace import Flow
from meshwright.apply.pipeline.tracing.observation import observe
from meshwright.apply.state.settling import settle
from meshwright.comm.communicator import Communicator

__all__: list[str] = []


def see_calls(
    group: Communicator,
    device: torch.device,
    module: nn.Module,
    run: Callable[[nn.Module], Any] | None,
    *,
    num_stages: int,
    closed: Collection[str],
    on_copy: bool,
) -> Flow:
    """Return the calls of a model's forward, the same on every rank; each calls this.

    A flag that a layer sets in its first forward, and other code reads, is set on all ranks before the model is cut; what
    changes in each forward is not.

    Args:
        group: All ranks.
        device: The device of the exchange.
        module: The plain model.
        run: Runs the model and its loss on a small batch; None where this rank has no sample.
        num_stages: Stages that it will be cut into [count].
        closed: Modules that stay in one piece.
        on_copy: Whether to run a copy of the model, with parameters of its own.

    Raises:
        ApplyError: No rank has a sample, or the forward cannot be cut.
    """

    def look(run: Callable[[nn.Module], Any]) -> dict[str, Any]:
        return observe(module, run, num_stages=num_stages, closed=closed, on_copy=on_copy).to_json()

    flow = Flow.from_json(tell_everyone(group, device, module, run, look))
    if flow.shared and all(group.all_gather_json(run is not None, device=device)):
        settled = None
        if run is not None:
            settled = settle(module, on_all_samples(run), device, in_eval_mode_too=begins_in_eval_mode(run))
        told = group.all_gather_json(settled and settled.digest, device=device)
        if settled is not None and len(set(told)) > 1:
            settled.undo()  # ranks have different samples, and have kept different things
        elif settled is not None:
            flow = Flow.from_json(tell_everyone(group, device, module, run, look))
    flow.refuse()
    return flow
