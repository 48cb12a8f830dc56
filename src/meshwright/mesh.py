"""Mesh: ranks as points of a grid with the axes ``pp, dp, cp, tp``, and the groups along its axes.

[Note: axis order] Outermost first. The last axis varies fastest, so the ranks of a tp group are neighbours and sit on
the fastest links; a pp neighbour is the furthest away, since pipelines send the least. For ``pp=2, dp=2, tp=2``:

             dp 0      dp 1
            tp 0 1    tp 0 1
    pp 0      0 1       2 3
    pp 1      4 5       6 7
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from typing import ClassVar, NamedTuple

from meshwright.errors import ConfigError, did_you_mean
from meshwright.values import Problems, Value

__all__: list[str] = []


class AxisName(enum.StrEnum):
    """The axes, outermost first."""

    PP = "pp"
    DP = "dp"
    CP = "cp"
    TP = "tp"


AXES: tuple[AxisName, ...] = tuple(AxisName)


class Coordinate(NamedTuple):
    """A rank's position on all axes, each counted from 0."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return " ".join(f"{axis}={index}" for axis, index in zip(AXES, self, strict=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec(Value):
    """The degree of every axis, and the arithmetic between ranks and coordinates.

    Args:
        pp: Pipeline stages' ranks, outermost.
        dp: Data parallel ranks.
        cp: Context parallel ranks.
        tp: Tensor parallel ranks, innermost: neighbours.

    Raises:
        ConfigError: A degree is below 1.

    >>> mesh = MeshSpec(pp=2, dp=2, tp=2)
    >>> mesh.world_size, mesh.coordinate(5), mesh.rank(pp=1, tp=1)
    (8, Coordinate(pp=1, dp=0, cp=0, tp=1), 5)
    >>> mesh.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> mesh.group("dp", rank=5)
    (5, 7)
    """

    FORMAT: ClassVar[str] = "mesh"

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        self._check_types()
        problems = Problems("mesh")
        for axis in AXES:
            degree = self.degree(axis)
            problems.require(degree >= 1, f"{axis}={degree} (rule: a degree is at least 1)", fix=f"{axis}=1")
        problems.check()

    def __str__(self) -> str:
        return ",".join(f"{axis}={self.degree(axis)}" for axis in AXES if self.degree(axis) > 1) or "single"

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the degrees."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The degrees, outermost axis first: pp, dp, cp, tp [count]."""
        return (self.pp, self.dp, self.cp, self.tp)

    def degree(self, axis: AxisName | str) -> int:
        """Return the degree of an axis: its ranks [count].

        Raises:
            ConfigError: There is no such axis.
        """
        return self.shape[_position(axis)]

    def coordinate(self, rank: int) -> Coordinate:
        """Return where a rank sits.

        Raises:
            ConfigError: The rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is outside the world of {self.world_size} ranks (rule: 0 <= rank < {self.world_size})"
            )
        indices: list[int] = []
        for degree in reversed(self.shape):
            rank, index = divmod(rank, degree)
            indices.append(index)
        return Coordinate(*reversed(indices))

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at a coordinate; the inverse of ``coordinate``.

        Args:
            pp: Index along the pipeline axis, 0 .. degree - 1; so are the others along theirs.
            dp: Index along the data parallel axis.
            cp: Index along the context parallel axis.
            tp: Index along the tensor parallel axis.

        Raises:
            ConfigError: An index is outside its axis.
        """
        problems = Problems("mesh")
        rank = 0
        for axis, index, degree in zip(AXES, (pp, dp, cp, tp), self.shape, strict=True):
            problems.require(
                0 <= index < degree, f"{axis} index {index} is outside its axis (rule: 0 <= index < {degree})"
            )
            rank = rank * degree + index
        problems.check()
        return rank

    def groups(self, *axes: AxisName | str) -> tuple[tuple[int, ...], ...]:
        """Return all groups: sets of ranks that differ only on the given axes.

        Args:
            *axes: One axis or more; ``groups("dp", "cp")`` has one group for every pp and tp index.

        Returns:
            The groups, ordered by their lowest rank; each in rank order. Together they hold every rank once.

        Raises:
            ConfigError: There is no such axis, or none is given.
        """
        chosen = {_position(axis) for axis in axes}
        if not chosen:
            raise ConfigError("mesh: groups() needs an axis", fix='write groups("dp")')
        fixed = [range(degree) if position not in chosen else range(1) for position, degree in enumerate(self.shape)]
        return tuple(self._group_at(Coordinate(*indices), chosen) for indices in itertools.product(*fixed))

    def group(self, *axes: AxisName | str, rank: int) -> tuple[int, ...]:
        """Return the group that holds a rank.

        Args:
            *axes: The axes on which its ranks differ.
            rank: The rank.

        Returns:
            Its ranks, ascending.

        Raises:
            ConfigError: There is no such axis or rank.
        """
        if not axes:
            raise ConfigError("mesh: group() needs an axis", fix='write group("dp", rank=0)')
        return self._group_at(self.coordinate(rank), {_position(axis) for axis in axes})

    def _group_at(self, coordinate: Coordinate, chosen: set[int]) -> tuple[int, ...]:
        moving = [
            range(degree) if position in chosen else (coordinate[position],)
            for position, degree in enumerate(self.shape)
        ]
        return tuple(self.rank(**Coordinate(*indices)._asdict()) for indices in itertools.product(*moving))


def _position(axis: AxisName | str) -> int:
    try:
        return AXES.index(AxisName(axis))
    except ValueError:
        raise ConfigError(
            f"mesh: there is no axis '{axis}'{did_you_mean(axis, AXES)}; the axes are {', '.join(AXES)}"
        ) from None
