"""Rehearsal of `model_parallel`: the bytes that its devices will move, from the engine's own cut and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.apply.one_process.model_parallel import LayersEngine
from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.describe.batches import model_inputs
from meshwright.spec.plan import Plan

__all__: list[str] = []


def foresee_moves(build_model: Callable[[], nn.Module], plan: Plan, batch: Any) -> float:
    """Return what the devices of a plan move in a step of as many such micro-batches as it has [bytes].

    Args:
        build_model: Builds the model.
        plan: A plan of mode "model_parallel".
        batch: One micro-batch.

    Raises:
        Exception: Whatever the user's code raises, or a model whose forward needs values.
    """
    group = Communicator(None, ranks=[0], rank=0, ledger=Ledger(), timeout_s=1.0)
    engine = LayersEngine(build_model(), group, [torch.device("cpu")] * plan.pp, stages=dict(plan.stages))
    engine.look_at(*model_inputs(batch))
    return float(plan.micro_batches * engine.count_moved_bytes(batch))
