"""Check of batches: equal on ranks that share layers, and no rank's share another one's; texts name ranks and difference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.mesh import MeshSpec
from meshwright.run.sentinels.circles import circles_of
from meshwright.run.sentinels.digest import digest_batch, digest_rows, digest_tensor, named_tensors, named_values

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_MOST_ROWS = 10_000


def warn_of_equal_shares(group: Communicator, mesh: MeshSpec, batch: Any, device: torch.device) -> None:
    """Warn where a rank's share of the first batch is another one's, value for value; every rank calls it.

    A loop over a plain DataLoader gives every rank the whole data set: nothing fails, and each sample counts several times.
    """
    digests = group.all_gather_json(digest_batch(batch, whole=True), device=device)
    for circle in circles_of(mesh, "dp", "cp"):
        mine = [digests[rank] for rank in circle.ranks]
        same = [rank for rank, digest in zip(circle.ranks, mine, strict=True) if digest and mine.count(digest) > 1]
        if same and group.rank == same[0]:
            _LOG.warning(
                "ranks %s train on the same batch, value for value (rule: each rank has its own share of the global batch): "
                "every sample counts several times. Fix: take batches from mw.make_loader(dataset, model), or step on "
                "mw.split_batch(batch, model)",
                same,
            )


def refuse_other_forms(
    group: Communicator, mesh: MeshSpec, axes: Sequence[str], batch: Any, device: torch.device
) -> None:
    """Raise ApplyError on every rank where ranks that take the same samples bring first batches of other forms.

    The trials of a first batch come before steps compare batches, and ranks would go different ways in them. Args as for
    `raise_different_batches`; every rank calls it.
    """
    form = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named_tensors(batch)]
    told = group.all_gather_json(None if batch is None else form, device=device)
    if any(told[rank] != told[circle.ranks[0]] for circle in circles_of(mesh, *axes) for rank in circle.ranks):
        raise_different_batches(group, mesh, axes, batch, device)


def raise_different_batches(
    group: Communicator, mesh: MeshSpec, axes: Sequence[str], batch: Any, device: torch.device
) -> None:
    """Raise ApplyError on every rank where ranks that take the same samples hold different batches; every rank calls it.

    Args:
        group: All ranks.
        mesh: Their mesh.
        axes: Those along which ranks take the same samples.
        batch: What this rank has.
        device: Where it computes.
    """
    rows = [[name, str(tuple(t.shape)), _kind_text(t), f"{digest_tensor(t):x}"] for name, t in named_tensors(batch)]
    rows += [[name, "", "", text] for name, text in named_values(batch)]
    everyone = group.all_gather_json(None if batch is None else rows, device=device)
    for circle in circles_of(mesh, *axes):
        first = circle.ranks[0]
        for other in circle.ranks[1:]:
            difference = _first_difference(everyone[first], everyone[other])
            if difference is None:
                continue
            name, what = difference
            why = "take each batch whole" if "dp" in axes else "share the model's layers"
            row = _first_row(group, batch, name, (first, other), device)
            raise ApplyError(
                f"ranks {list(circle.ranks)} {why} and must step on the same share of the batch: on ranks "
                f"{first} and {other} {what}{row}",
                fix="hand make_loader or split_batch the same global batch on every rank: seed what draws it alike "
                "(torch.manual_seed(step), say); data that a script shares out itself goes by model.dp_rank, not by rank",
            )


def _kind_text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, which requires a gradient" if tensor.requires_grad else str(tensor.dtype)


def _first_difference(mine: Any, theirs: Any) -> tuple[str | None, str] | None:
    """Return (the tensor that differs in its values, what differs), or None."""
    if mine is None or theirs is None:
        return (
            None if mine is theirs else (None, f"{'one is' if mine or theirs else 'the batch is'} None, an empty share")
        )
    names, other_names = [row[0] for row in mine], [row[0] for row in theirs]
    if names != other_names:
        return None, f"it holds other tensors or values: {', '.join(names)}, and {', '.join(other_names)}"
    for (name, shape, dtype, digest), (_, other_shape, other_dtype, other_digest) in zip(mine, theirs, strict=True):
        if shape != other_shape:
            return None, f"{_shown(name)} has other shapes: {shape} and {other_shape}"
        if dtype != other_dtype:
            return None, f"{_shown(name)} has other dtypes: {dtype} and {other_dtype}"
        if digest != other_digest and not shape:
            return None, f"{_shown(name)} is {digest[:60]} and {other_digest[:60]}"
        if digest != other_digest:
            return name, f"{_shown(name)} has other values"
    return None


def _shown(name: str) -> str:
    return f"batch{name}" if name.startswith("[") else name


def _first_row(group: Communicator, batch: Any, name: str | None, pair: tuple[int, int], device: torch.device) -> str:
    """Return the first row in which two ranks' tensors differ, as text; every rank calls this for the same tensor."""
    tensor = None if name is None or batch is None else dict(named_tensors(batch)).get(name)
    short = tensor is not None and tensor.dim() > 0 and 1 < tensor.shape[0] <= _MOST_ROWS
    found = group.all_gather_json(
        [f"{digest:x}" for digest in digest_rows(tensor)] if tensor is not None and short else [], device=device
    )
    digests = [found[rank] for rank in pair]
    rows = [row for row, (mine, theirs) in enumerate(zip(*digests, strict=False)) if mine != theirs]
    if not rows:
        return ""
    return f" in {len(rows)} of {len(digests[0])} rows, row {rows[0]} first"
