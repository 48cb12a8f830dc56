"""Generators of ranks that share layers or a batch, set to those of the first of them where they stand elsewhere.

Where a later model's plan has given these ranks generators of their own, since they are different shares there, or where ranks
join the shares that their script gives them, each rank gets its own back after each step: else those ranks would draw the same
numbers for different samples. Ranks that are one share there, too, keep what all have drawn from, so that a script's own draws
between steps stay alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from meshwright.apply.engine import Engine
from meshwright.mesh import MeshSpec
from meshwright.python_state import PythonState
from meshwright.run.diagnose import RandomState
from meshwright.run.sentinels.circles import Circle

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")


class CommonDraws:
    """The generators of one model's ranks.

    Args:
        engine: The engine.
        drawing: The ranks that share layers with this one.
        sharing: The ranks that share a batch with it.
    """

    def __init__(self, engine: Engine, drawing: Circle, sharing: Circle) -> None:
        self._engine = engine
        self._drawing = drawing
        self._sharing = sharing
        self._has_warned = False
        self._own: RandomState | None = None
        self._own_python: PythonState | None = None
        self._num_earlier = len(self._meshes())

    def _meshes(self) -> Sequence[MeshSpec]:
        calls = self._engine.everyone.calls
        return () if calls is None else calls.meshes

    def _are_apart(self) -> bool:
        """Whether these ranks are given different shares, here or by a later model's plan, with generators of their own."""
        ranks = self._drawing.ranks
        return bool(self._engine.joins_shares) or any(
            len({mesh.coordinate(rank).dp for rank in ranks}) > 1 for mesh in self._meshes()[self._num_earlier :]
        )

    def draw_together(self, step: int) -> None:
        """Set torch's generators of ranks that share layers to those of the first of them; every rank calls it."""
        engine, leader_rank = self._engine, self._drawing.ranks[0]
        state = RandomState.read(engine.device)
        parts = [state.cpu] if state.cuda is None else [state.cpu, state.cuda]
        own = torch.cat(parts)
        states = [part.cpu() for part in engine.everyone.all_gather(own.to(engine.device))]
        leader = states[leader_rank]
        if self._are_apart():
            self._own = state
        elif not self._has_warned and not torch.equal(leader, own):
            self._has_warned = True
            _LOG.warning(
                "step %d: torch's generator on rank %d stands elsewhere than on rank %d, with which it shares layers: one of "
                "them has drawn numbers that the other has not. It goes on with those of rank %d, here and in later steps",
                *(step, self._drawing.rank, leader_rank, leader_rank),
            )
        cpu, cuda = leader[: state.cpu.numel()], leader[state.cpu.numel() :]
        RandomState(cpu, None if state.cuda is None else cuda).restore(engine.device)

    def give_back(self) -> None:
        """Restore this rank's own generators after a step; the first rank goes on with those that all have drawn from."""
        own, self._own = self._own, None
        if own is not None and self._drawing.rank != self._drawing.ranks[0]:
            own.restore(self._engine.device)
        python, self._own_python = self._own_python, None
        if python is not None and self._sharing.rank != self._sharing.ranks[0]:
            python.restore()

    def draw_python_together(self, step: int) -> None:
        """Set Python's and NumPy's generators of ranks that share a batch to those of the first; every rank calls it."""
        state = PythonState()
        told = self._engine.everyone.all_gather_json(state.to_json(), device=self._engine.device)
        leader, own = self._sharing.ranks[0], told[self._sharing.rank]
        if self._engine.joins_shares:
            self._own_python = state
        elif not self._has_warned and told[leader] != own:
            self._has_warned = True
            _LOG.warning(
                "step %d: Python's or NumPy's generator on rank %d stands elsewhere than on rank %d, with which it shares a "
                "batch. It goes on with the numbers of rank %d, here and in later steps",
                *(step, self._sharing.rank, leader, leader),
            )
        PythonState.from_json(told[leader]).restore()
