"""Boundaries of stages, inspected in turn: what a stage gets of others is compared with what was sent."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.apply.finding import Finding
from meshwright.apply.pipeline.stage import Stage, boundary_name

__all__: list[str] = []


class BoundaryInspection:
    """Has the stages of this rank check the inputs of one stage, theirs or another's.

    Args:
        stages: Those of this rank.
        num_stages: Stages of the model [count].
    """

    def __init__(self, stages: Collection[Stage], num_stages: int) -> None:
        self._stages = stages
        self._num_stages = num_stages

    def begin(self, turn: int) -> str:
        """Begin with the stage whose turn it is; return the name of its inputs."""
        inspected = 1 + turn % (self._num_stages - 1)
        for stage in self._stages:
            stage.inspects = inspected
        return boundary_name(inspected)

    def end(self) -> list[Finding]:
        """Return what was found."""
        found: list[Finding] = []
        for stage in self._stages:
            stage.inspects = -1
            found += stage.findings
            stage.findings = []
        return found
