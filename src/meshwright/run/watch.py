"""Writes between steps: a parameter that one rank has written to, and others that hold it as well have not."""

from __future__ import annotations

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.comm.communicator import Communicator
from meshwright.mesh import MeshSpec
from meshwright.run.circles import circles_of

__all__: list[str] = []

_PIECES = "what this rank's optimizer updates"


class StateWatch:
    """The versions of a rank's parameters as they were when the last step ended: torch counts the writes to a tensor.

    Args:
        engine: The strategy.
        optimizer: What updates the parameters, or None.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer | None) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] | None = None

    def _find(self) -> None:
        named = dict(self._engine.module.named_parameters())
        known = {id(parameter) for parameter in named.values()}
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        pieces = [tensor for group in groups for tensor in group["params"] if id(tensor) not in known]
        self._names = [*named, *[_PIECES] * len(pieces)]
        self._tensors = [*named.values(), *pieces]

    def note(self) -> None:
        """Take note of the versions at the end of a step."""
        if not self._tensors:
            self._find()
        self._versions = [tensor._version for tensor in self._tensors]

    def written(self) -> list[str]:
        """Return the FQNs of the parameters that were written to since the last step ended."""
        versions = self._versions
        if versions is None or versions == [tensor._version for tensor in self._tensors]:
            return []
        changed = zip(self._names, self._tensors, versions, strict=True)
        return list(dict.fromkeys(name for name, tensor, version in changed if tensor._version != version))

    def compare(self, group: Communicator, mesh: MeshSpec) -> list[Finding]:
        """Return what was written to on this rank and not on all that hold it as well; every rank calls it.

        Args:
            group: All ranks.
            mesh: Their places.
        """
        everyone = group.all_gather_json(self.written(), device=self._engine.device)
        findings = []
        for circle in circles_of(mesh, "dp", "cp", "tp"):
            for name in dict.fromkeys(name for rank in circle.ranks for name in everyone[rank]):
                wrote = [rank for rank in circle.ranks if name in everyone[rank]]
                if len(wrote) < len(circle.ranks) and group.rank == wrote[0]:
                    others = [rank for rank in circle.ranks if rank not in wrote]
                    text = f"it was written to between two steps on rank(s) {wrote} and not on rank(s) {others}"
                    findings.append(Finding(part=name, difference=float("nan"), tolerance=0.0, text=text))
        return findings
