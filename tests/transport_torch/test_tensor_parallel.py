"""DTensor: column and row parallel layers, parallel sequences, parallel losses, and shards of all that; redistribution."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.scopes import FULL_GRID
from tests.transport_torch import models
from tests.transport_torch.harness import (
    Numbers,
    assert_plain,
    assert_same_numbers,
    make_mesh,
    record,
    record_end,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

NUM_STEPS = 2
ROWS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """How the transformer is cut: over all ranks, or over pairs of them where it is sharded as well."""

    num_ranks: int
    sequence: bool = False
    parallel_loss: bool = False
    fsdp: bool = False

    def __str__(self) -> str:
        words = [name for name in ("sequence", "parallel_loss", "fsdp") if getattr(self, name)]
        return "-".join([f"{self.num_ranks}ranks", *words])


def parallel_styles(case: Case) -> dict[str, ParallelStyle]:
    """Return the style of every module of `Transformer`, by name."""
    last: dict[str, Any] = (
        {"output_layouts": Shard(-1), "use_local_output": False}
        if case.parallel_loss
        else {"output_layouts": Replicate()}
    )
    if not case.sequence:
        outer: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(**last),
        }
        into, out_of = {}, RowwiseParallel()
    else:
        outer = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), **last),
        }
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        into = {
            "layers.*.norm1": SequenceParallel(),
            "layers.*.norm2": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(**gather),
            "layers.*.mlp": PrepareModuleInput(**gather),
        }
        out_of = RowwiseParallel(output_layouts=Shard(1))
    columns = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    return {
        **outer,
        **into,
        **columns,
        "layers.*.attention.out": out_of,
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": out_of,
    }


def cut_transformer(backend: str, case: Case) -> tuple[nn.Module, DeviceMesh]:
    """Return the cut model and its mesh."""
    model = models.build(models.Transformer)
    assert isinstance(model, models.Transformer)
    if not case.fsdp:
        mesh = make_mesh(backend, (case.num_ranks,), ("tp",))
        return parallelize_module(model, mesh, parallel_styles(case)), mesh
    mesh = make_mesh(backend, (case.num_ranks // 2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], parallel_styles(case))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def train(backend: str, case: Case) -> Numbers:
    """Train the transformer; all ranks see the same rows, or each pair of ranks its share of them."""
    model, mesh = cut_transformer(backend, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        x, y = models.tokens(step, ROWS)
        if case.fsdp:
            x, y = (models.share(t, mesh["dp"].get_local_rank(), mesh["dp"].size()) for t in (x, y))
        if case.parallel_loss:
            with loss_parallel():
                loss = model(x, y)
                loss.backward()
        else:
            loss = model(x, y)
            loss.backward()
        record(numbers, step, model, loss)
        if case.sequence:  # there, every parameter is a DTensor; torch takes no norm of a mixture
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            numbers[f"step {step} norm"] = whole(norm)
        optimizer.step()
        optimizer.zero_grad()
    record_end(numbers, model)
    return numbers


def _plain(*, norms: bool) -> Numbers:
    numbers = models.plain_steps(models.Transformer, NUM_STEPS, ROWS)
    for step in range(NUM_STEPS if norms else 0):
        gradients = [value for name, value in numbers.items() if name.startswith(f"step {step} gradient")]
        numbers[f"step {step} norm"] = nn.utils.get_total_norm(gradients)
    return numbers


PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"), Partial("max")]


def redistribute(backend: str, rows: int) -> Numbers:
    """Move a matrix, whose rows may not divide by the ranks, from every placement to every other one."""
    mesh = make_mesh(backend, (dist.get_world_size(),), ("tp",))
    matrix = torch.arange(rows * 6, dtype=torch.float64).view(rows, 6) / 7
    numbers: Numbers = {}
    for source, target in itertools.product(PLACEMENTS, PLACEMENTS):
        if isinstance(target, Partial):
            continue  # torch makes a partial tensor out of another one in no case but the trivial ones
        if isinstance(source, Partial):
            placed = DTensor.from_local(matrix * (1 + mesh.get_local_rank()), mesh, [source], run_check=False)
        else:
            placed = distribute_tensor(matrix * (1 + mesh.get_local_rank()), mesh, [source])  # rank 0's is taken
        moved = placed.redistribute(placements=[target])
        numbers[f"{source} to {target}, local"] = moved.to_local().clone()
        numbers[f"{source} to {target}, whole"] = whole(moved)
    return numbers


# On two ranks one thing at a time, on four, which take longest, everything or nothing; MESHWRIGHT_FULL_GRID=1 has the rest.
CASES = [
    Case(2, sequence=True),
    Case(2, parallel_loss=True),
    Case(4),
    Case(4, sequence=True, parallel_loss=True, fsdp=True),
]
if FULL_GRID:
    CASES += [Case(2), Case(2, sequence=True, parallel_loss=True)]
    CASES += [Case(4, sequence=True), Case(4, parallel_loss=True), Case(4, sequence=True, parallel_loss=True)]
    CASES += [Case(4, fsdp=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cut_transformer_trains_as_a_whole_one(case: Case) -> None:
    per_rank = assert_same_numbers(train, case.num_ranks, case)
    assert_plain(per_rank, _plain(norms=case.sequence))


@pytest.mark.parametrize("rows", [4, 5, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensors_move_between_placements(num_ranks: int, rows: int) -> None:
    per_rank = assert_same_numbers(redistribute, num_ranks, rows)
    matrix = torch.arange(rows * 6, dtype=torch.float64).view(rows, 6) / 7
    multiples = [matrix * (1 + rank) for rank in range(num_ranks)]
    expected = {"P(sum)": sum(multiples), "P(avg)": sum(multiples) / num_ranks, "P(max)": multiples[-1]}
    for rank, numbers in enumerate(per_rank):
        for name, value in numbers.items():
            if name.endswith("whole"):
                wanted = expected.get(name.split(" ")[0].replace("Partial", "P"), matrix)
                torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0.0, msg=f"rank {rank}, {name}")
