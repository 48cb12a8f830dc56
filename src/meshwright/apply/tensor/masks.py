"""Random states of dropout on ranks that share a layer: shards must have different masks, copies the same."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.apply.finding import Finding
from meshwright.apply.randomness.sites import draws_by_place
from meshwright.apply.tensor.search.operations import WithoutDropout
from meshwright.apply.tensor.types.pointwise import drops
from meshwright.apply.tensor.types.typed_run import name_of
from meshwright.comm.communicator import Communicator

__all__: list[str] = []


class NotedDropout(WithoutDropout):
    """Dropout that drops nothing, and records each shape and the generator's state."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[tuple[int, ...], int]] = []
        # Numbers by place come from no state: whether shards draw the parts of one mask was tried with the first batch.
        self._by_place = draws_by_place()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._by_place and args and isinstance(args[0], Tensor) and drops(name_of(func), args, kwargs or {}):
            tensor = args[0]
            state = torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else torch.get_rng_state()
            self.notes.append((tuple(tensor.shape), zlib.crc32(state.numpy().data)))
        return super().__torch_function__(func, types, args, kwargs)


@dataclasses.dataclass(frozen=True)
class Mask:
    """One dropout call of a part: whether it is on a shard, and a digest of its random state."""

    part: str
    is_shard: bool
    state: int


def masks_of(part: str, cut: NotedDropout, whole: NotedDropout) -> list[Mask]:
    """Return the masks of a run on shards, beside those of the whole; nothing where the two did not call the same."""
    if len(cut.notes) != len(whole.notes):
        return []
    pairs = zip(cut.notes, whole.notes, strict=True)
    return [Mask(part, own != full, state) for (own, state), (full, _) in pairs if math.prod(own)]


def compare_masks(group: Communicator, masks: Sequence[Mask], device: torch.device) -> list[Finding]:
    """Return where shards share a mask, or copies differ, each part once, on the first rank; every rank calls it."""
    everyone = group.all_gather_json([dataclasses.astuple(mask) for mask in masks], device=device)
    if len({tuple(row[:2] for row in map(tuple, theirs)) for theirs in everyone}) > 1:
        return []  # a rank without entries of a tensor draws nothing for it
    findings: dict[str, Finding] = {}
    for place, mask in enumerate(masks if group.group_rank == 0 else ()):
        states = [theirs[place][2] for theirs in everyone]
        num_expected = group.size if mask.is_shard else 1
        if len(set(states)) != num_expected:
            what = "of the ranks' shards are equal" if mask.is_shard else "of one tensor differ from rank to rank"
            text = f"the masks that dropout draws {what}: ranks {list(group.ranks)} draw from {len(set(states))} states"
            findings.setdefault(mask.part, Finding(part=mask.part, difference=math.nan, tolerance=0.0, text=text))
    return list(findings.values())
