"""Sentinels of an applied model, made where ranks have the same settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.apply.engine import Engine
from meshwright.mesh import MeshSpec
from meshwright.run.sentinels import settings
from meshwright.run.sentinels.name_orders import require_equal_in_order
from meshwright.run.sentinels.sentinels import Sentinels

__all__: list[str] = []


def make_sentinels(
    engine: Engine,
    place: tuple[MeshSpec, int],
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    options: Mapping[str, Any],
) -> Sentinels:
    """Compare the ranks' settings, and return the sentinels.

    Args:
        engine: The engine, before it has adopted the optimizer.
        place: The ranks' mesh, and this rank.
        optimizer: The optimizer, as it was built.
        loss_fn: As for `apply_plan`.
        options: Further options of `apply_plan` that ranks must have alike, by name.

    Raises:
        ApplyError: Ranks have different settings.
    """

    def rows() -> settings.Rows:
        return [
            *settings.of_options(optimizer),
            *settings.of_torch(engine.device),
            *settings.of_modes(engine.module),
        ]

    if engine.everyone.size > 1:
        at_start = functools.partial(settings.at_start, engine.module, optimizer, loss_fn, options, engine.device)
        require_equal_in_order(engine.everyone, engine.module, at_start, engine.device)
    return Sentinels(
        engine,
        optimizer,
        place=place,
        every=options["sentinel_every"],
        on_finding=options["on_finding"],
        rows=rows,
        loss_fn=loss_fn,
    )
