"""Pipeline schedules as data: [rank][slot] -> action. Free of torch.

A schedule is built, checked, simulated and drawn here; the pipeline's executor runs it without knowing its kind.

action    one action of one stage
orders    the order of each schedule
halves    backward in halves
pipeline  PipelineSchedule, the public class
simulate  times of actions, and the bubble
drawing   a schedule as text, as large as can be read
svg       a schedule as a picture, for notebooks
balance   the cut of a chain of layers into stages of equal work

To add a schedule, touch `orders.py` alone; `pipeline.py` checks it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from meshwright.schedule.action import Action, ActionKind
    from meshwright.schedule.pipeline import PipelineSchedule
    from meshwright.schedule.simulate import Simulation

__all__ = ["Action", "ActionKind", "PipelineSchedule", "Simulation"]

_MODULE_OF_NAME: Final = {
    "Action": "action",
    "ActionKind": "action",
    "PipelineSchedule": "pipeline",
    "Simulation": "simulate",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used (PEP 562): a search of plans needs `balance` alone."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
