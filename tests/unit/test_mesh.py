from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.strategies import meshes

from meshwright.errors import ConfigError
from meshwright.mesh import AXES, AxisName, MeshSpec

AXIS_SETS = st.sets(st.sampled_from(AXES), min_size=1).map(sorted)


@given(meshes())
def test_rank_to_coordinate_to_rank_is_the_identity(mesh: MeshSpec) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(**coordinate._asdict()) for coordinate in coordinates] == list(range(mesh.world_size))
    assert coordinates == sorted(set(coordinates))


@given(meshes(), AXIS_SETS)
def test_groups_partition_the_world_and_differ_only_on_their_axes(mesh: MeshSpec, axes: list[AxisName]) -> None:
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        fixed = {tuple(getattr(mesh.coordinate(rank), axis) for axis in AXES if axis not in axes) for rank in group}
        assert len(fixed) == 1
        assert list(group) == sorted(group)
        assert all(mesh.group(*axes, rank=rank) == group for rank in group)


def test_tp_ranks_are_neighbours_and_pp_is_outermost() -> None:
    mesh = MeshSpec(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("cp") == tuple((rank,) for rank in range(8))
    assert mesh.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert str(mesh.coordinate(6)) == "pp=1 dp=1 cp=0 tp=0"


@given(meshes())
def test_json_round_trip(mesh: MeshSpec) -> None:
    assert MeshSpec.from_json(mesh.to_json()) == mesh


def test_all_broken_degrees_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*dp=0.*tp=-1"):
        MeshSpec(dp=0, tp=-1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: mesh.coordinate(4), "rank 4 is outside the world of 4 ranks"),
        (lambda mesh: mesh.coordinate(-1), "rank -1 is outside"),
        (lambda mesh: mesh.rank(dp=2), "dp index 2 is outside its axis"),
        (lambda mesh: mesh.groups("tpp"), r"no axis 'tpp' \(did you mean '.p'\?\)"),
        (lambda mesh: mesh.groups(), "needs an axis"),
        (lambda mesh: mesh.group(rank=0), "needs an axis"),
    ],
)
def test_what_does_not_exist_is_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(MeshSpec(dp=2, tp=2))
