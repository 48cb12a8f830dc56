"""Structure of a model that its first forward changes: settled on all ranks together, before a strategy looks at the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.first_look import begins_in_eval_mode, on_all_samples
from meshwright.apply.state.settling import Children, settle
from meshwright.errors import ApplyError
from meshwright.run.losses.settle import has_room

__all__: list[str] = []


def settle_structure(engine: Engine, run: Callable[[nn.Module], Any] | None, look: Callable[[], None]) -> bool:
    """Run trials of a model, and settle its structure where they have replaced modules; every rank calls this.

    Where parameters are pieces, ranks make them whole for it. Too large a model is left as it was; its first step refuses it.

    Args:
        engine: The strategy, before it looks at the model.
        run: Runs the model and its loss on a small batch; None where this rank has no sample.
        look: The trials, which leave all but children as it was.

    Returns:
        Whether the model has other modules now, the same on all ranks.

    Raises:
        ApplyError: On every rank: ranks would have different modules.
    """
    module = engine.module
    before = Children(module)
    try:
        look()
    finally:
        has_changed = before.have_changed()
        before.restore()
    if not any(engine.everyone.all_gather_json(has_changed, device=engine.device)):
        return False
    if engine.holds_parts and not has_room(engine):
        return False
    settled = None
    with engine.whole_parameters(), engine.switch.plain():
        if run is not None:
            settled = settle(module, on_all_samples(run), engine.device, in_eval_mode_too=begins_in_eval_mode(run))
    kept = "" if settled is None else settled.digest
    told = engine.everyone.all_gather_json(_digest(module) + kept, device=engine.device)
    if len(set(told)) > 1:
        raise ApplyError(
            "the model's first forward replaces modules, and ranks have different ones after it: their batches differ, or a rank "
            "has no sample",
            fix="run the model once before apply_plan, on every rank alike; or give every rank samples of one form",
        )
    return True


def _digest(module: nn.Module) -> str:
    names = [(name, f"{type(child).__module__}.{type(child).__qualname__}") for name, child in module.named_modules()]
    return hashlib.sha256(repr(names).encode()).hexdigest()
