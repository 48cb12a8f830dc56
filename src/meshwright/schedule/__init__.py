"""Pipeline schedules as data: [rank][slot] -> action; build, validate, simulate, draw."""

from meshwright.schedule.action import Action, ActionKind
from meshwright.schedule.pipeline import PipelineSchedule
from meshwright.schedule.simulate import Simulation

__all__ = ["Action", "ActionKind", "PipelineSchedule", "Simulation"]
