"""Inspection of stage boundaries: digests of received tensors compared with digests of what was sent."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.apply.finding import Finding
from meshwright.apply.pipeline.stage import Stage, boundary_name

__all__: list[str] = []


class BoundaryInspection:
    """Checks all inputs of this rank's stages; a digest costs little beside a stage.

    Args:
        stages: Those of this rank.
    """

    def __init__(self, stages: Collection[Stage]) -> None:
        self._stages = stages

    def begin(self) -> str:
        """Start the inspection and return the name of the first boundary."""
        for stage in self._stages:
            stage.is_inspected = True
        return boundary_name(1)

    def end(self) -> list[Finding]:
        """Return what was found."""
        found: list[Finding] = []
        for stage in self._stages:
            stage.is_inspected = False
            found += stage.findings
            stage.findings = []
        return found
