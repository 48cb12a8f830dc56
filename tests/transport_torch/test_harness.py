"""The comparison itself: what it is to see, it sees; and the groups are what they are said to be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from tests.transport_torch.harness import (
    BACKEND,
    BITWISE,
    SUM_ORDER,
    Numbers,
    assert_equal,
    assert_same_numbers,
    make_mesh,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ONE = torch.tensor([1.0, -2.0], dtype=torch.float64)
MATRIX = torch.arange(20.0, dtype=torch.float64).view(5, 4)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": torch.tensor([1.0, math.nextafter(-2.0, 0.0)], dtype=torch.float64)}, "differs by 1.11e-16"),
        ({"a": torch.tensor([1.0, math.nan], dtype=torch.float64)}, "not finite"),
        ({"a": ONE.float()}, "float32"),
        ({"a": ONE[:1]}, "torch.Size"),
        ({}, "on one side only"),
        ({"a": ONE, "b": ONE}, "on one side only"),
    ],
    ids=["last_bit", "nan", "dtype", "shape", "missing", "added"],
)
def test_differences_are_seen(found: Numbers, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_equal(found, {"a": ONE}, BITWISE, "this")


def test_a_tolerance_allows_what_it_says() -> None:
    assert_equal({"a": ONE * (1 + 1e-13)}, {"a": ONE}, SUM_ORDER, "this")
    with pytest.raises(AssertionError, match="differs"):
        assert_equal({"a": ONE * (1 + 1e-11)}, {"a": ONE}, SUM_ORDER, "this")


def look_at_groups(backend: str) -> Numbers:
    """Return what a mesh's groups have for ranks."""
    mesh = make_mesh(backend, (2, 2), ("rows", "columns"))
    for name in ("rows", "columns"):
        assert dist.get_backend(mesh.get_group(name)) == backend
        assert dist.get_backend(mesh[name].get_group()) == backend
    return {name: torch.tensor(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("rows", "columns")}


def test_a_mesh_has_groups_of_the_backend_for_every_dimension() -> None:
    per_rank = assert_same_numbers(look_at_groups, 4)
    assert [numbers["rows"].tolist() for numbers in per_rank] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [numbers["columns"].tolist() for numbers in per_rank] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def cut_over_meshes_of_torch(backend: str) -> Numbers:
    """Cut a matrix over a mesh that torch makes with the default group's backend, and over one with this backend."""
    names = ("rows", "columns")
    override = dict.fromkeys(names, backend)
    meshes = {
        "default": (dist.get_backend(), init_device_mesh("cpu", (2, 2), mesh_dim_names=names)),
        "given": (backend, init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)),
    }
    numbers: Numbers = {}
    for name, (wanted, mesh) in meshes.items():
        for group in mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).name() == wanted
        cut = distribute_tensor(MATRIX, mesh, [Shard(0), Shard(1)])
        numbers[f"{name} whole"], numbers[f"{name} local"] = cut.full_tensor(), cut.to_local().clone()
    return numbers


def test_torch_makes_meshes_of_the_backend_by_itself() -> None:
    for numbers in assert_same_numbers(cut_over_meshes_of_torch, 4, tolerance=BITWISE):
        for name in ("default", "given"):
            assert torch.equal(numbers[f"{name} whole"], MATRIX)
            assert numbers[f"{name} local"].numel() in (4, 6)


def name_backends(backend: str) -> Numbers:
    """Raise with the name of the backend, on the one that is under test."""
    if backend == BACKEND:
        raise LookupError(f"this is {backend}")
    return {"a": ONE}


def test_the_backend_under_test_is_reached() -> None:
    with pytest.raises(LookupError, match=f"this is {BACKEND}"):
        assert_same_numbers(name_backends, 2)
