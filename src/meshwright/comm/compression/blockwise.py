"""Blockwise reducer: it sends codes instead of numbers.

Of two ranks each sends the other all of its codes (`all_gather`). Of more, each rank owns a piece of every tensor. Codes of the
pieces go to their owners (`all_to_all`), which sum them in full precision; the sums' codes go to all ranks (`all_gather`). Both
send 2 (n - 1) / n of the codes, as a ring does of the numbers. A reduce-scatter is the first half.

The rounding error stays with the rank that rounded, in `unsent`, and is added to its next gradient. An owner does not round its
own numbers, so its part of `unsent` is free for the rounding error of the sum. One number an element therefore holds the feedback
of both halves (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847, on why it works).

Owners are chosen tensor by tensor, and each tensor starts a new block. So no bit depends on which gradients share a bucket, which
changes after the first step and after a restart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from meshwright.comm.communicator import Communicator, Pending
from meshwright.comm.compression.codecs import Cast, Codec
from meshwright.comm.compression.reducer import GradientSet, GradientSpec, KeptTensors, Reducer, Stages, work_dtype

__all__: list[str] = []

PART_NUMEL = 2**16
"""Numbers that are coded at a time [count]: 256 KiB of float32, so that the passes over them stay in the cache. A multiple of
every codec's block."""

_WORTH_IT = 0.75
"""A tensor is coded where that takes at most this share of its bytes; short matrices would be mostly filling [fraction]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _CodedPart:
    """A range of numbers that are coded together."""

    index: int  # the tensor
    start: int
    stop: int
    at: int  # begin of its payload in the owner's row [bytes]
    end: int
    is_coded: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets of all parts in the exchanged rows."""

    by_owner: list[list[_CodedPart]]
    width: int  # a row, the longest owner's [bytes]


class BlockwiseReducer(Reducer):
    """Sums gradients that are sent as codes, with error feedback.

    Args:
        group: The ranks.
        codec: The code of numbers.
        words: Its name, for a plan's reasons.
    """

    def __init__(self, group: Communicator, codec: Codec, words: str) -> None:
        self._unsent = KeptTensors("unsent")
        super().__init__(group, self._unsent)
        self._codec = codec
        self._words = words
        self._exactly = Cast(None)
        self._layouts: dict[object, _Layout] = {}
        self._rooms: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self.num_stages = 1 if group.size <= 2 else 2

    # -- the reductions -----------------------------------------------------------------------------------------

    def all_reduce(self, gradients: GradientSet) -> Stages:
        """Sum over all ranks, in their order or on one of them; all ranks hold the same bits afterwards."""
        if self._group.size == 1 or not gradients.tensors or self._layout_of(gradients).width == 0:
            return
        yield from self._exchange_all(gradients) if self._group.size == 2 else self._over_owners(gradients)

    def _exchange_all(self, gradients: GradientSet) -> Stages:
        """Exchange all codes between two ranks, which both add the same numbers."""
        layout = self._layout_of(gradients)
        rank = self._group.group_rank
        codes = self._rows(gradients, layout)
        self._keep_and_encode(gradients, layout.by_owner[0], codes[rank])
        yield self._group.all_gather_into(codes.view(-1), codes[rank], async_op=True)
        like = gradients.tensors[0]
        for part in layout.by_owner[0]:
            numbers = [self._decoded(part, like, row, place) for place, row in enumerate(codes)]
            if part.is_coded:
                self._unsent_of(gradients, part).sub_(numbers[rank])
            _target(gradients, part).copy_(numbers[0].add_(numbers[1]))

    def _over_owners(self, gradients: GradientSet) -> Stages:
        layout = self._layout_of(gradients)
        rank, like = self._group.group_rank, gradients.tensors[0]
        outgoing, incoming = self._rows(gradients, layout), self._rows(gradients, layout)
        for owner, parts in enumerate(layout.by_owner):
            if owner != rank:
                self._keep_and_encode(gradients, parts, outgoing[owner])
        yield self._trade(incoming, outgoing)
        sums = self._rows(gradients, layout)
        for part in layout.by_owner[rank]:
            self._encode_sum(gradients, part, incoming, sums[rank])
        del incoming
        yield self._group.all_gather_into(sums.view(-1), sums[rank], async_op=True)
        for owner, parts in enumerate(layout.by_owner):
            for part in parts:
                total = self._decoded(part, like, sums[owner], 0)
                if part.is_coded:
                    sent = total if owner == rank else self._decoded(part, like, outgoing[owner], 1)
                    self._unsent_of(gradients, part).sub_(sent)
                _target(gradients, part).copy_(total)

    def _encode_sum(self, gradients: GradientSet, part: _CodedPart, incoming: torch.Tensor, row: torch.Tensor) -> None:
        """Sum the received parts of an owned piece, add this rank's unsent rest, and encode it."""
        mine, payload = _target(gradients, part), row[part.at : part.end]
        others = self._sum_of_others(part, mine, incoming)
        if not part.is_coded:
            self._exactly.encode(others.add_(mine).to(mine.dtype), payload)
            return
        unsent = self._unsent_of(gradients, part)
        if gradients.present[part.index]:
            unsent.add_(mine).add_(others)
        elif bool(others.count_nonzero()):
            unsent.add_(others)
        else:  # maybe no rank has a gradient, and this sum is discarded
            payload.zero_()
            return
        self._codec.encode(unsent, payload)

    def reduce_slices(self, gradients: GradientSet, ends: Sequence[int]) -> None:
        """Sum this rank's slice of the concatenated tensors; the rest is undefined afterwards."""
        if self._group.size == 1:
            return
        layout = self._layout_of(gradients, ends)
        if layout.width == 0:
            return
        rank, like = self._group.group_rank, gradients.tensors[0]
        outgoing, incoming = self._rows(gradients, layout), self._rows(gradients, layout)
        for owner, parts in enumerate(layout.by_owner):
            if owner != rank:
                self._keep_and_encode(gradients, parts, outgoing[owner])
        pending = self._trade(incoming, outgoing)
        for owner, parts in enumerate(layout.by_owner):
            for part in parts if owner != rank else ():
                if part.is_coded and gradients.present[part.index]:
                    self._unsent_of(gradients, part).sub_(self._decoded(part, like, outgoing[owner], 0))
        pending.wait()
        for part in layout.by_owner[rank]:
            mine = _target(gradients, part)
            mine.copy_(self._sum_of_others(part, mine, incoming).add_(mine))

    def _trade(self, incoming: torch.Tensor, outgoing: torch.Tensor) -> Pending:
        """Start sending row i of `outgoing`, [size, width] bytes, to rank i; row i of `incoming` comes from it."""
        group = self._group
        return group.issue(
            "all_to_all",
            outgoing.nbytes,
            lambda later: dist.all_to_all_single(incoming, outgoing, group=group.process_group, async_op=later),
            async_op=True,
        )

    # -- parts --------------------------------------------------------------------------------------------------

    def _keep_and_encode(self, gradients: GradientSet, parts: Sequence[_CodedPart], row: torch.Tensor) -> None:
        """Add the gradient to the unsent rest, and encode the sum."""
        for part in parts:
            payload = row[part.at : part.end]
            if not part.is_coded:
                self._exactly.encode(_target(gradients, part), payload)
            elif gradients.present[part.index]:
                unsent = self._unsent_of(gradients, part)
                self._codec.encode(unsent.add_(_target(gradients, part)), payload)
            else:
                payload.zero_()  # reads as zeros

    def _sum_of_others(self, part: _CodedPart, mine: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
        total = self._room(mine, 1)[: mine.numel()].zero_()
        for giver in range(self._group.size):
            if giver != self._group.group_rank:
                total.add_(self._decoded(part, mine, incoming[giver], 0))
        return total

    def _decoded(self, part: _CodedPart, like: torch.Tensor, row: torch.Tensor, place: int) -> torch.Tensor:
        """Return a part's numbers, [stop - start], in one of the two scratch buffers."""
        numbers = self._room(like, place)[: part.stop - part.start]
        payload = row[part.at : part.end]
        if part.is_coded or like.dtype == numbers.dtype:
            (self._codec if part.is_coded else self._exactly).decode(payload, numbers)
        else:
            own = torch.empty_like(numbers, dtype=like.dtype)
            self._exactly.decode(payload, own)
            numbers.copy_(own)
        return numbers

    def _room(self, like: torch.Tensor, place: int) -> torch.Tensor:
        key = like.device, work_dtype(like.dtype)
        if key not in self._rooms:
            self._rooms[key] = torch.empty((2, PART_NUMEL), dtype=key[1], device=key[0])
        return self._rooms[key][place]

    def _unsent_of(self, gradients: GradientSet, part: _CodedPart) -> torch.Tensor:
        spec, like = gradients.specs[part.index], gradients.tensors[part.index]
        dtype = work_dtype(like.dtype)
        unsent = self._unsent.get(spec.name, (spec.numel,), dtype, like.device)
        if unsent is None:
            unsent = self._unsent.put(spec.name, torch.zeros(spec.numel, dtype=dtype, device=like.device))
        return unsent[part.start : part.stop]

    # -- the layout ---------------------------------------------------------------------------------------------

    def _rows(self, gradients: GradientSet, layout: _Layout) -> torch.Tensor:
        """Return uninitialised memory for each rank's payloads: [size, width] bytes. Padding is sent, but not read."""
        return torch.empty((self._group.size, layout.width), dtype=torch.uint8, device=gradients.tensors[0].device)

    def _layout_of(self, gradients: GradientSet, ends: Sequence[int] | None = None) -> _Layout:
        census = 0 if gradients.census is None else gradients.census.numel()
        key = (tuple(spec.name for spec in gradients.specs), census, None if ends is None else tuple(ends))
        if key not in self._layouts:
            if len(self._layouts) > 10_000:  # a bound for models whose parameters are frozen and thawed again and again
                self._layouts.clear()
            self._layouts[key] = self._lay_out(gradients, ends)
        return self._layouts[key]

    def _lay_out(self, gradients: GradientSet, ends: Sequence[int] | None) -> _Layout:
        dtype = gradients.tensors[0].dtype
        numels = [spec.numel for spec in gradients.specs]
        coded = [self._is_worth_it(spec, dtype) for spec in gradients.specs]
        if gradients.census is not None:
            numels.append(gradients.census.numel())
            coded.append(False)
        stretches = _owned_slices(numels, ends) if ends is not None else self._owned_pieces(numels, gradients.specs)
        by_owner: list[list[_CodedPart]] = [[] for _ in range(self._group.size)]
        sizes = [0] * self._group.size
        for index, first, last, owner in stretches:
            codec, kind = (self._codec, work_dtype(dtype)) if coded[index] else (self._exactly, dtype)
            for start in range(first, last, PART_NUMEL):
                stop = min(start + PART_NUMEL, last)
                at = sizes[owner]
                sizes[owner] = at + codec.payload_bytes(stop - start, kind)
                by_owner[owner].append(_CodedPart(index, start, stop, at, sizes[owner], coded[index]))
        return _Layout(by_owner, max(sizes))

    def _is_worth_it(self, spec: GradientSpec, dtype: torch.dtype) -> bool:
        as_codes = self._codec.payload_bytes(spec.numel, work_dtype(dtype))
        return spec.is_matrix and as_codes <= _WORTH_IT * spec.numel * dtype.itemsize

    def payload_bytes(self, spec: GradientSpec, dtype: torch.dtype) -> int:
        if self._is_worth_it(spec, dtype):
            return self._codec.payload_bytes(spec.numel, work_dtype(dtype))
        return self._exactly.payload_bytes(spec.numel, dtype)

    def _owned_pieces(
        self, numels: Sequence[int], specs: Sequence[GradientSpec]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tensor, start, stop, owner): an equal piece of each tensor for each rank; with two ranks all is the first's.

        Cuts lie at whole blocks. The owner of the remainder depends on the name, so that it is not always the same rank.
        """
        size = 1 if self._group.size == 2 else self._group.size
        for index, numel in enumerate(numels):
            num_blocks = -(-numel // _BLOCK)
            cuts = [min(numel, num_blocks * place // size * _BLOCK) for place in range(size + 1)]
            shift = sum(specs[index].name.encode()) if index < len(specs) else 0
            for place, (first, last) in enumerate(itertools.pairwise(cuts)):
                if first < last:
                    yield index, first, last, (place + shift) % size

    def explain(self) -> str:
        return (
            f"gradients of matrices are sent as {self._words}: this changes numbers. What rounding takes away is added to the "
            "next step's gradient; vectors and scalars are sent as they are"
        )


_BLOCK = 256
"""Owners' pieces are cut at multiples of this [count]: whole blocks of every codec."""


def _owned_slices(numels: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tensor, start, stop, owner) for concatenated tensors cut at `ends`."""
    begins = [0, *itertools.accumulate(numels)]
    for index, numel in enumerate(numels):
        for owner, end in enumerate(ends):
            first = max((ends[owner - 1] if owner else 0) - begins[index], 0)
            last = min(end - begins[index], numel)
            if first < last:
                yield index, first, last, owner


def _target(gradients: GradientSet, part: _CodedPart) -> torch.Tensor:
    """Return a part's numbers in place: in a gradient, or in the census, which is treated as one more tensor."""
    if part.index < len(gradients.tensors):
        tensor = gradients.tensors[part.index]
    else:
        tensor = gradients.census if gradients.census is not None else gradients.tensors[0]
    return tensor[part.start : part.stop]
