"""Pipeline schedules as data: [rank][slot] -> action; built, checked, simulated, drawn. Free of torch.

action    one action of one stage
orders    the order of each schedule
halves    backward in halves
pipeline  PipelineSchedule: what users see
simulate  times of actions, and the bubble

To add a schedule: `orders.py` alone; `pipeline.py` checks it.
"""

from meshwright.schedule.action import Action, ActionKind
from meshwright.schedule.pipeline import PipelineSchedule
from meshwright.schedule.simulate import Simulation

__all__ = ["Action", "ActionKind", "PipelineSchedule", "Simulation"]
