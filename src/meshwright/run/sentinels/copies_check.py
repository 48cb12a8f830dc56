"""Comparison of copies bit by bit: first by digests, then tensor by tensor where those differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from meshwright.apply.engine import Engine
from meshwright.apply.finding import Finding
from meshwright.comm.communicator import Communicator
from meshwright.run.sentinels.digest import digest_of, digest_of_shape, digest_tensor

__all__: list[str] = []

_MOST_SHOWN = 4
"""Tensors of which the difference is measured [count]."""
_PIECE = 2**22
"""Entries that are exchanged at once while it is [count]."""

Named = list[tuple[str, torch.Tensor]]


def compare_copies(engine: Engine, optimizer: torch.optim.Optimizer | None) -> list[Finding]:
    """Return the differences of this rank's parameters, buffers and optimizer state from those of other ranks with copies.

    Every rank calls it.
    """
    findings: list[Finding] = []
    for group, named in engine.copies_of_state():
        if group.size == 1:
            continue
        held = [*named, *_kept_by(optimizer, named)]
        if not is_equal(group, digest_of([tensor for _, tensor in held]), engine.device):
            findings += _differences(group, held, engine.device)
    return findings


def _kept_by(
    optimizer: torch.optim.Optimizer | None, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of an optimizer's state for these parameters."""
    if optimizer is None or not optimizer.state:
        return
    for name, parameter in named:
        if isinstance(parameter, torch.nn.Parameter) and parameter in optimizer.state:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} (the optimizer's {key})", value


def is_equal(group: Communicator, digest: int, device: torch.device) -> bool:
    """Whether all ranks have one digest: the largest and the smallest of its halves are equal."""
    halves = [float(digest >> 32), float(digest & 2**32 - 1)]
    vector = torch.tensor([*halves, *(-half for half in halves)], dtype=torch.float64, device=device)
    group.all_reduce(vector, "max")
    high, low, minus_high, minus_low = vector.tolist()
    return high == -minus_high and low == -minus_low


def _differences(group: Communicator, held: Named, device: torch.device) -> list[Finding]:
    """Return this rank's differences; every rank of the group calls it."""
    mine = {name: [f"{digest_tensor(t):x}", f"{digest_of_shape(t):x}"] for name, t in held}
    everyone = group.all_gather_json(mine, device=device)
    odd = [name for name in mine if any(theirs.get(name, mine[name]) != mine[name] for theirs in everyone)]
    # A name missing on some ranks is not a copy there: with uneven shares, shards have other bounds.
    odd = [name for name in odd if all(name in theirs for theirs in everyone)]
    tensors = dict(held)
    findings = []
    for place, name in enumerate(odd):
        digests = [theirs[name] for theirs in everyone]
        usual = max(digests, key=digests.count)
        source = digests.index(usual)
        is_tie = digests.count(usual) * 2 == len(digests)
        others = [group.ranks[index] for index, digest in enumerate(digests) if digest != usual]
        measure = place < _MOST_SHOWN and len({shape for _, shape in digests}) == 1
        difference = _largest_difference(group, tensors[name], source, device) if measure else float("nan")
        if mine[name] != usual and not difference <= _allowed(group, tensors[name]):
            findings.append(
                Finding(
                    part=name,
                    difference=difference,
                    tolerance=_allowed(group, tensors[name]),
                    text=f"the values on rank(s) {others} are not those of rank {group.ranks[source]}, of which they are copies"
                    + ("; which of them are wrong, copies alone do not show" if is_tie else ""),
                )
            )
    return findings


def allowed_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Return the tolerated difference between results that several ranks compute, relative to the largest entry.

    On the host it is 0: one kernel on one input gives the same bits. On other devices some kernels add in any order.
    """
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled() or not dtype.is_floating_point:
        return 0.0
    return float(torch.finfo(dtype).eps) ** 0.5


def _allowed(group: Communicator, tensor: torch.Tensor) -> float:
    """Return the tolerated difference of copies: those of data-parallel ranks are made of the same sums."""
    return allowed_difference(tensor.device, tensor.dtype) if group.axis == "tp" else 0.0


def _largest_difference(group: Communicator, tensor: torch.Tensor, source: int, device: torch.device) -> float:
    """Return the largest difference of this rank's values from the group's rank `source`, relative to the largest entry."""
    value = tensor.detach()
    flat = (value.to_dense() if value.layout != torch.strided else value).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    largest = torch.zeros((), dtype=torch.float64)
    entry = torch.zeros((), dtype=torch.float64)
    for own in flat.split(_PIECE):
        theirs = own.to(device, torch.float64, copy=True)
        group.broadcast(theirs, source)
        largest = torch.maximum(largest, (own.to(device, torch.float64) - theirs).abs().max().cpu())
        entry = torch.maximum(entry, theirs.abs().max().cpu())
    return float(largest / entry) if entry else float(largest)
