"""Run a piece of torch's own parallelism over gloo and over the backend under test, in the same ranks, and compare.

A case is a function `case(backend, *args) -> Numbers` that every rank calls, once per backend. It takes its groups from
`make_group` and `make_mesh`, and returns what it computed: losses, gradients, parameters, by name.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright import testing

BACKEND = os.environ.get("MESHWRIGHT_TEST_BACKEND", "shm")
REFERENCE = "gloo"

BITWISE = 0.0
# Backends may add three or more numbers in different orders; relative to the largest entry of the reference's tensor.
SUM_ORDER = 1e-12
SUM_ORDER_FLOAT32 = 1e-6
# A parallel run against a plain one, which also takes its matrix products whole: as everywhere in these tests.
PLAIN = 1e-11

Numbers = dict[str, torch.Tensor]

# A collective that waits longer than this is stuck. The ranks' default group would wait far longer than a test may take.
_DEADLINE = datetime.timedelta(seconds=20)
# So is a whole case that takes longer than this: it may wait for something that is no collective, or for one that never starts.
_CASE_DEADLINE_S = 30.0

_groups: dict[tuple[str, tuple[int, ...], str], dist.ProcessGroup] = {}
_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def sum_order(num_ranks: int, dtype: torch.dtype = torch.float64) -> float:
    """Return how far sums over ranks may differ between backends: two numbers have the same sum in either order."""
    if num_ranks == 2:
        return BITWISE
    return SUM_ORDER if dtype == torch.float64 else SUM_ORDER_FLOAT32


def make_group(backend: str, ranks: Sequence[int] | None = None, purpose: str = "") -> dist.ProcessGroup:
    """Return a group of this backend, all ranks by default. Every rank of the world has to call, with the same arguments.

    Groups are kept: ranks serve many tests, and the order of calls is the same on all of them. Each purpose has its own.
    """
    members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
    key = (backend, members, purpose)
    if key not in _groups:
        group = dist.new_group(list(members), backend=backend, timeout=_DEADLINE)
        if dist.get_rank() in members:
            # What really serves it: a backend may have handed the group to another one, and tests would see nothing of it.
            assert group._get_backend(torch.device("cpu")).name() == backend, f"there is no {backend} here"
        _groups[key] = group
    return _groups[key]


def make_mesh(backend: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh over all ranks, all of whose groups have this backend and a deadline."""
    key = (backend, shape, names)
    if key not in _meshes:
        layout = torch.arange(dist.get_world_size()).view(shape)
        groups = []
        for dim in range(len(shape)):
            rows = layout.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
            made = [make_group(backend, row) for row in rows]
            groups += [group for row, group in zip(rows, made, strict=True) if dist.get_rank() in row]
        mesh = DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], "cpu", layout if len(groups) > 1 else None, mesh_dim_names=names
        )
        _meshes[key] = mesh
    assert {str(dist.get_backend(group)) for group in _meshes[key].get_all_groups()} == {backend}
    return _meshes[key]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy, put together from all ranks where the tensor is distributed."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def record(numbers: Numbers, step: int, model: torch.nn.Module, loss: torch.Tensor | None = None) -> None:
    """Note the loss and the gradients of a step; before the optimizer's step, which may change them."""
    if loss is not None:
        numbers[f"step {step} loss"] = whole(loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            numbers[f"step {step} gradient {name}"] = whole(parameter.grad)


def record_end(numbers: Numbers, model: torch.nn.Module) -> None:
    """Note the parameters and the buffers."""
    for name, parameter in model.named_parameters():
        numbers[f"parameter {name}"] = whole(parameter)
    for name, buffer in model.named_buffers():
        numbers[f"buffer {name}"] = whole(buffer)


def without_prefix(numbers: Numbers, prefix: str = "module.") -> Numbers:
    """Return the numbers under the names that they have without a wrapper."""
    return {name.replace(prefix, ""): value for name, value in numbers.items()}


def assert_equal(found: Numbers, expected: Numbers, tolerance: float, what: str) -> None:
    """Fail where a tensor is missing, is of another kind, is not finite, or differs by more than the tolerance."""
    assert expected, f"{what}: nothing was recorded"
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())} on one side only"
    for name, reference in expected.items():
        value = found[name]
        assert value.dtype == reference.dtype, f"{what}, {name}: {value.dtype}, not {reference.dtype}"
        assert value.shape == reference.shape, f"{what}, {name}: {value.shape}, not {reference.shape}"
        if value.numel() == 0 or torch.equal(value, reference):
            continue
        value, reference = value.double(), reference.double()
        assert value.isfinite().all(), f"{what}, {name}: not finite"
        error = ((value - reference).abs().max() / reference.abs().max()).item()
        assert error <= tolerance, f"{what}, {name}: differs by {error:.3g} relative, allowed is {tolerance:.3g}"


def assert_same_numbers(
    case: Callable[..., Numbers], num_ranks: int, *args: Any, tolerance: float | None = None
) -> list[Numbers]:
    """Run a case over both backends, compare every rank's numbers, and return those of the backend under test."""
    allowed = sum_order(num_ranks) if tolerance is None else tolerance
    pairs = testing.run_ranks(on_both, num_ranks, case, BACKEND, args)
    for rank, (reference, tested) in enumerate(pairs):
        assert_equal(tested, reference, allowed, f"rank {rank}, {BACKEND} against {REFERENCE}")
    return [tested for _, tested in pairs]


def on_both(case: Callable[..., Numbers], backend: str, args: tuple[Any, ...]) -> tuple[Numbers, Numbers]:
    """In a rank: run a case over gloo, then over the backend under test."""
    return strictly(case, REFERENCE, *args), strictly(case, backend, *args)


def strictly(case: Callable[..., Numbers], backend: str, *args: Any) -> Numbers:
    """In a rank: run a case over one backend. A warning is an error; a rank that is late prints its stacks and exits."""
    faulthandler.dump_traceback_later(_CASE_DEADLINE_S, exit=True)
    try:
        with strict_warnings():
            return case(backend, *args)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Turn warnings into errors, as pytest does in its own process, but for torch's notices to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        warnings.filterwarnings("ignore", r"torch\.distributed\.nn\.functional\.\w+ is deprecated", FutureWarning)
        yield


def assert_plain(per_rank: Sequence[Numbers], plain: Numbers, tolerance: float = PLAIN) -> None:
    """Compare every rank with one plain process; its loss is the mean of the ranks', whose shares are equally large."""
    losses = {name: torch.stack([numbers[name] for numbers in per_rank]).mean(0) for name in plain if "loss" in name}
    for rank, numbers in enumerate(per_rank):
        assert_equal({**numbers, **losses}, plain, tolerance, f"rank {rank} against one plain process")
