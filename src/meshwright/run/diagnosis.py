"""Error of a step whose loss or gradients are not finite, from a second run of it on whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.apply.engine import Engine
from meshwright.errors import NonFiniteError
from meshwright.run.diagnose import RandomState, explain_non_finite, find_non_finite
from meshwright.run.losses.terms import LossTerms

__all__: list[str] = []


def diagnose(
    engine: Engine, terms: LossTerms, parts: list[Any], random_state: RandomState, *, loss: float, norm: float
) -> NonFiniteError:
    """Return the error that names the first value that is not finite; every rank calls it.

    Args:
        engine: The engine.
        terms: Computes losses.
        parts: This rank's micro-batches.
        random_state: Random state of before the step.
        loss: The loss of all ranks.
        norm: The norm of the whole gradient.
    """

    def loss_of(module: nn.Module, part: Any) -> torch.Tensor:
        term = terms.of_any(module, part)
        if term is None:
            raise RuntimeError("the whole model has no loss")
        return term.value

    with engine.switch.suspended(), engine.whole_parameters():
        finding = find_non_finite(engine.module, parts, loss_of, random_state, engine.device)
    guess = {"guess": engine.reads_as_nan} if engine.reads_as_nan else {}
    return explain_non_finite(engine.group, finding, loss=loss, norm=norm, device=engine.device, **guess)
