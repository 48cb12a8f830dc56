"""This rank's parts of the model, its optimizer and its streams, and which rank writes each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.engine import Engine
from meshwright.apply.held_state import HeldPart
from meshwright.checkpoint.manifest import ITEM_BYTES
from meshwright.checkpoint.tensor_files import dtype_name
from meshwright.errors import CheckpointError
from meshwright.mesh import MeshSpec
from meshwright.run.checkpoints.optimizer_rows import PREFIX, OptimizerRows
from meshwright.run.checkpoints.random_streams import read_streams
from meshwright.spec import Plan

__all__: list[str] = []

MODEL = "model"
RANDOM = "random"
COMPRESSION = "compression"


def stored_name(fqn: str) -> str:
    """Return the name of a parameter or buffer in files: without the wrappers of torch.compile.

    >>> stored_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return fqn.replace("_orig_mod.", "")


def place_of(plan: Plan, rank: int) -> dict[str, Any]:
    """Return a rank's coordinates on the mesh of its plan, and the mesh's sizes."""
    mesh = plan.mesh if plan.mode == "ranks" else MeshSpec()
    place = mesh.coordinate(rank)._asdict()
    return {**place, "sizes": {axis: mesh.degree(axis) for axis in place}}


@dataclasses.dataclass(frozen=True)
class RankState:
    """What one rank holds.

    Args:
        parts: Its tensors, by their stored names.
        told: The rest, as JSON.
    """

    parts: list[HeldPart]
    told: dict[str, Any]

    def rows(self) -> list[list[Any]]:
        """Return [name, dtype, stored shape, dim, ranges, flat, order] of each part, for the other ranks."""
        return [
            [
                part.name,
                dtype_name(part.tensor.dtype),
                part.layout.shape,
                part.layout.dim,
                part.layout.ranges,
                part.layout.flat,
                part.order,
            ]
            for part in self.parts
        ]


def collect(
    engine: Engine,
    held: Sequence[HeldPart],
    optimizer: torch.optim.Optimizer | None,
    place: Mapping[str, Any],
    rank: int,
) -> RankState:
    """Return what this rank holds; nothing is exchanged.

    Args:
        engine: The engine.
        held: Its `held_state`.
        optimizer: The optimizer, or None where its state is left out.
        place: This rank's coordinates.
        rank: This rank.

    Raises:
        CheckpointError: Something has no place in a file.
    """
    parts = [dataclasses.replace(part, name=f"{MODEL}/{stored_name(part.name)}") for part in held]
    told: dict[str, Any] = {"place": dict(place), "aliases": aliases_of(engine.module, held)}
    if optimizer is not None:
        rows = OptimizerRows(optimizer, held, stored_name)
        parts += rows.parts
        told |= {"state": rows.state, "groups": rows.groups}
    parts += [HeldPart.whole(f"{RANDOM}/rank-{rank}/{name}", state) for name, state in read_streams(engine).items()]
    rest = engine.compression_state()
    parts += [HeldPart.whole(f"{COMPRESSION}/rank-{rank}/{name}", tensor) for name, tensor in rest.items()]
    for part in parts:
        if part.tensor.layout != torch.strided or part.tensor.is_meta:
            raise CheckpointError(
                f"'{part.name}' has no dense values to save: it is {part.tensor.layout} on {part.tensor.device}"
            )
    _refuse_one_name_for_two(parts)
    _refuse_extra_state(engine.module)
    return RankState(parts, told)


def _refuse_one_name_for_two(parts: Sequence[HeldPart]) -> None:
    """Raise an error where two tensors would be one entry: 'w' with a state of {'x': {'m': ...}} and 'w/x' with {'m': ...}."""
    found: dict[tuple[str, str], Tensor] = {}
    for part in parts:
        key = part.name, repr(part.layout)
        if found.setdefault(key, part.tensor) is not part.tensor:
            raise CheckpointError(
                f"two tensors would be saved as '{part.name}': a name with '/' or '_orig_mod.' is read as another one's",
                fix="rename that module or parameter",
            )


def trained_names(held: Sequence[HeldPart], optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the stored names of what only an optimizer's step changes: the parameters that it has, and what it keeps for them.

    Args:
        held: The engine's `held_state`.
        optimizer: The model's optimizer.
    """
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parts = [part for part in held if id(part.owner) in updated]
    found = [f"{MODEL}/{stored_name(part.name)}" for part in parts]
    for part in parts:
        state = optimizer.state.get(part.owner, {})
        found += [f"{PREFIX}/{stored_name(part.name)}/{key}" for key, value in state.items() if torch.is_tensor(value)]
    return frozenset(found)


def aliases_of(module: nn.Module, held: Sequence[HeldPart]) -> dict[str, str]:
    """Return the further names of what this rank holds -> the names under which it is stored."""
    first = {part.name for part in held}
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in first:
            names.setdefault(id(tensor), name)
    for name, tensor in named:
        kept = names.get(id(tensor))
        if kept is not None and stored_name(name) != stored_name(kept):
            found[f"{MODEL}/{stored_name(name)}"] = f"{MODEL}/{stored_name(kept)}"
    return found


def _refuse_extra_state(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"'{name or type(child).__name__}' gives state_dict() an object by get_extra_state(), which has no place among "
                "tensors",
                fix="register its tensors as buffers, or pass what saves and loads it as extra={'name': object}",
            )


def writers_of(rows: Sequence[Sequence[Sequence[Any]]]) -> dict[str, list[tuple[int, int]]]:
    """Return which rank writes each part, computed alike on all ranks: every entry once, shared out by size.

    Args:
        rows: `RankState.rows` of all ranks.

    Returns:
        Name -> (rank, place among its rows) of each part of the tensor.

    Raises:
        CheckpointError: Ranks tell different shapes or types of one tensor.
    """
    holders: dict[tuple[str, str], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[Any, ...]] = {}
    for rank, theirs in enumerate(rows):
        for place, (name, dtype, shape, dim, ranges, flat, order) in enumerate(theirs):
            kind = dtype, tuple(shape), tuple(order)
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"ranks have '{name}' as {kinds[name]} and as {kind}: one tensor has one type and shape"
                )
            holders.setdefault((name, repr([dim, ranges, flat])), []).append((rank, place))
    loads = [0] * len(rows)
    found: dict[str, list[tuple[int, int]]] = {}
    for (name, _), held in holders.items():
        rank, place = min(held, key=lambda pair: loads[pair[0]])
        loads[rank] += _bytes_of(rows[rank][place])
        found.setdefault(name, []).append((rank, place))
    return found


def _bytes_of(row: Sequence[Any]) -> int:
    _, dtype, shape, dim, ranges, flat, _ = row
    if flat is not None:
        return (flat[1] - flat[0]) * ITEM_BYTES[dtype]
    count = 1
    for size in shape:
        count *= size
    if dim is not None:
        count = count // max(shape[dim], 1) * sum(stop - start for start, stop in ranges)
    return count * ITEM_BYTES[dtype]
