"""Rows that code chooses by an index (tokens of an expert, edges of a graph, sequences without padding), followed to samples.

How many rows of a sample a draw gets, and where they lie, depends on values. The index that chose them tells: entry 37 of twelve
rows a sample is row 1 of sample 3. What such a row draws is a function of the module, the sample, the row's place in it and how
often this module has drawn for the row before, whichever rows lie beside it and in whatever order experts are called.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright._torch_dispatch import draws_untouched
from meshwright.apply.randomness import native
from meshwright.apply.randomness.choice_by_index import ChosenByIndex
from meshwright.apply.randomness.philox import INDEX_BITS, RowPlaces
from meshwright.apply.randomness.sample_dims import Call, SiteDims

__all__: list[str] = []

_TURN_BITS = 40
"""Above these bits of a sample's number stands how often its row has drawn before [bits]."""


class RowsChosen(NamedTuple):
    """What a trial notes of the rows that draw."""

    num_rows: int
    name: str
    """The module that has chosen them."""
    is_last: bool | None
    """Whether it has chosen no others since; None: it has chosen no others at all, which shows nothing."""
    is_in_order: bool
    """Whether they are all rows, in their order."""


class ChosenRows:
    """The choices of one forward, and the rows that have drawn."""

    def __init__(self) -> None:
        self._choices: list[ChosenByIndex] = []
        self._by_rows: dict[int, list[int]] = {}
        """Their places, by how many rows they have chosen: hundreds of experts' are not gone through at each draw."""
        self._by_memory: dict[StorageWeakRef, list[int]] = {}
        self._last_of: dict[str, ChosenByIndex] = {}
        self.has_unseen = False
        """Whether rows were chosen by numbers that another pipeline stage has."""
        self.unknown_turns: set[str] = set()
        """Modules that have drawn on another stage for rows that are not known here."""
        self._drawn: dict[str, Tensor] = {}
        """How often each row of each sample has drawn in a module: the samples innermost [count]."""
        self._places: dict[Call, RowPlaces] = {}

    def again(self) -> ChosenRows:
        """Return the same at this place of the forward, to go on with."""
        rows = ChosenRows()
        for choice in self._choices:
            rows._remember(choice)
        rows.has_unseen = self.has_unseen
        rows.unknown_turns = set(self.unknown_turns)
        rows._drawn = {name: counts.clone() for name, counts in self._drawn.items()}
        rows._places = dict(self._places)
        return rows

    def clear(self) -> None:
        """Forget what the forward has done."""
        self._choices.clear()
        self._by_rows.clear()
        self._by_memory.clear()
        self._last_of.clear()
        self.has_unseen = False
        self.unknown_turns.clear()
        self._drawn.clear()
        self._places.clear()

    def note(
        self,
        name: str,
        tensor: Tensor,
        result: Tensor,
        *,
        sizes: Sequence[int],
        indices: Sequence[Tensor],
        dim: int,
        is_of_torch: bool = False,
    ) -> None:
        """Remember a choice of rows.

        Args:
            name: The module whose code chooses.
            tensor: Among whose rows.
            result: What is chosen.
            sizes: The entries of the dims with an index, which lie beside each other [count].
            indices: Of these dims; or one mask of all of them.
            dim: The dim of it that holds the rows.
            is_of_torch: Whether code of torch chooses, which puts samples back that it has sorted.
        """
        among, is_unclear = self._among(name, tensor, math.prod(sizes))
        own = {"among": among, "is_unclear": is_unclear, "dim": None if is_of_torch else dim}
        self._keep(name, result, dim, tuple(sizes), tuple(indices), **own)

    def note_packing(self, name: str, tensor: Tensor, result: Tensor, batch_sizes: Tensor) -> None:
        """Remember sequences that were packed: a choice of their entries, step by step.

        Args:
            name: The module whose code packs.
            tensor: The sequences (samples, steps, ...), in the order in which they were packed.
            result: Their entries (entries, ...).
            batch_sizes: Samples of each step [count].
        """
        num_samples = len(tensor)
        steps, samples = rows_of_pack(batch_sizes)
        moved = [choice for choice in self._alike({num_samples}) if choice.num_sources == num_samples]
        order = next((choice for choice in moved if choice.rows_in(tensor) == slice(0, num_samples)), None)
        # Samples that the script has sorted went through a layer since; as many steps as samples may have been turned.
        is_unclear = order is None and tensor.shape[1] == num_samples and not all(one.is_in_order for one in moved)
        order = order or next(iter(moved), None)
        if order is not None:
            samples = order.sources().cpu()[samples]
        places = (steps.to(result.device), samples.to(result.device))
        sizes = (len(batch_sizes), num_samples)
        self._keep(name, result, 0, sizes, places, is_unclear=is_unclear, is_packed=True)

    def _keep(
        self,
        name: str,
        result: Tensor,
        rows_dim: int,
        sizes: tuple[int, ...],
        indices: tuple[Tensor, ...],
        **others: Any,
    ) -> None:
        place = (int(result.storage_offset()), int(result.stride(rows_dim)))
        versions = tuple(index._version for index in indices)
        memory = StorageWeakRef(result.untyped_storage())
        self._remember(ChosenByIndex(name, indices, sizes, result.shape[rows_dim], memory, *place, versions, **others))

    def _remember(self, choice: ChosenByIndex) -> None:
        place = len(self._choices)
        self._choices.append(choice)
        self._by_rows.setdefault(choice.num_rows, []).append(place)
        self._by_memory.setdefault(choice.memory, []).append(place)
        self._last_of[choice.name] = choice

    def _among(self, name: str, tensor: Tensor, num_rows: int) -> tuple[ChosenByIndex | None, bool]:
        """Return the choice that has made the rows of a tensor, and whether some choice may have without a sign of it."""
        alike = list(self._alike({num_rows}))
        for choice in alike:
            if (choice.name != name and is_around(choice.name, name)) or choice.rows_in(tensor) == slice(0, num_rows):
                return choice, False
        # Of a module beside this one, or before a layer that the rows went through; an expert may as well get all tokens.
        return None, bool(alike) and all(choice.num_rows < choice.num_sources for choice in alike)

    def look(
        self, shape: Sequence[int], running: Collection[str], given: Sequence[Tensor], num_samples: int
    ) -> RowsChosen | None:
        """Return what is known of the rows chosen for a draw; None: there is no such choice.

        Args:
            shape: What is drawn.
            running: The modules that run.
            given: What these were called with.
            num_samples: Of the forward [count].
        """
        sizes = {shape[dim] for dim in row_dims(shape)}
        for choice, num_rows in (*self._given(sizes, given), *((own, own.num_rows) for own in self._alike(sizes))):
            if choice.name in running and choice.num_sources % num_samples == 0 and not choice.is_unclear:
                with torch.no_grad(), draws_untouched():
                    is_last = self._is_last(choice) if self._has_others(choice) else None
                    return RowsChosen(num_rows, choice.name, is_last, choice.is_in_order)
        return None

    def out_of_order(self, num_rows: int) -> set[str]:
        """Return the modules that have chosen as many rows, and never each one in its order, as for an expert of all tokens."""
        alike = list(self._alike({num_rows}))
        with torch.no_grad(), draws_untouched():
            return {choice.name for choice in alike} - {choice.name for choice in alike if choice.is_in_order}

    def has_moved(self, num_samples: int, dim: int) -> bool:
        """Tell whether code has put the samples in another order, along this dim, and not back."""
        order: Tensor | None = None
        for choice in reversed(list(self._alike({num_samples}))):
            is_order = choice.num_rows == num_samples == math.prod(choice.sizes) and choice.among is None
            if not is_order or choice.dim != dim or not choice.is_unchanged:
                continue
            with torch.no_grad(), draws_untouched():
                own = choice.sources()
                order = torch.arange(num_samples, device=own.device) if order is None else order
                if not torch.equal(own, order):  # else another tensor, put in the same order
                    order = order[own]
        return order is not None and not torch.equal(order, torch.arange(num_samples, device=order.device))

    def _is_last(self, choice: ChosenByIndex) -> bool:
        return self._last_of[choice.name] is choice

    def _has_others(self, choice: ChosenByIndex) -> bool:
        return not all(map(choice.is_like, (other for other in self._choices if other.name == choice.name)))

    def _given(self, sizes: Collection[int], given: Sequence[Tensor]) -> Iterator[tuple[ChosenByIndex, int]]:
        """Yield choices that modules were given rows of, as many as one of these sizes, with that number."""
        yield from ((choice, len(tensor)) for choice, tensor, _ in self._held(sizes, given))

    def _held(self, sizes: Collection[int], given: Sequence[Tensor]) -> Iterator[tuple[ChosenByIndex, Tensor, slice]]:
        for tensor in given:
            if tensor.dim() and len(tensor) in sizes:
                for place in reversed(self._by_memory.get(StorageWeakRef(tensor.untyped_storage()), ())):
                    rows = self._choices[place].rows_in(tensor)
                    if rows is not None:
                        yield self._choices[place], tensor, rows

    def _alike(self, sizes: Collection[int]) -> Iterator[ChosenByIndex]:
        """Yield choices of as many rows as one of these sizes, the last first."""
        places = sorted(itertools.chain.from_iterable(self._by_rows.get(size, ()) for size in {*sizes}))
        return (self._choices[place] for place in reversed(places))

    def _find(self, dims: SiteDims, num_rows: int, given: Sequence[Tensor]) -> tuple[ChosenByIndex, slice] | None:
        """Return the choice of the rows that draw, and which of its rows; None where several might be."""
        for choice, _, rows in self._held({num_rows}, given):
            if choice.name == dims.follows:
                return choice, rows
        if self.has_unseen:
            return None  # it may have as many rows
        alike = [choice for choice in self._alike({num_rows}) if choice.name == dims.follows]
        if not alike:
            return None
        last, *others = alike
        is_clear = (dims.follows_last and self._is_last(last)) or all(map(last.is_like, others))
        return (last, slice(None)) if is_clear else None

    def place(
        self,
        call: Call,
        dims: SiteDims,
        num_rows: int,
        *,
        given: Sequence[Tensor],
        first: int,
        num_samples: int,
        row_stride: int,
    ) -> RowPlaces | None:
        """Return the places of the rows that draw now; None where no choice is known.

        The index of a row is that of the row among its sample's.

        Args:
            call: The call, whose places are given once more where backward repeats it.
            dims: Of the call.
            num_rows: Rows that it draws [count].
            given: What the modules that run were called with.
            first: The place of the forward's first sample.
            num_samples: Its samples [count].
            row_stride: By how much the next row moves an element's index within its sample.
        """
        known = self._places.get(call)
        if known is not None:
            return known if len(known.samples) == num_rows else None
        if call[0] in self.unknown_turns:
            return None
        with torch.no_grad(), draws_untouched():
            found = self._find(dims, num_rows, given)
            if found is None or found[0].is_unclear or found[0].num_sources % num_samples:
                return None
            if not found[0].is_unchanged or (dims.is_in_order and not found[0].is_ascending):
                return None
            if found[0].num_sources // num_samples * row_stride >> INDEX_BITS:
                return None
            places = self._places_of(*found, call[0], is_minor=dims.is_minor, first=first, num_samples=num_samples)
            self._places[call] = RowPlaces(places.samples, places.indices * row_stride)
        return self._places[call]

    def _places_of(
        self, choice: ChosenByIndex, rows: slice, name: str, *, is_minor: bool, first: int, num_samples: int
    ) -> RowPlaces:
        sources = choice.sources()[rows].contiguous()
        each = choice.num_sources // num_samples
        # By sample and row, in whatever tensor it lies: how long the others are, or another choice's samples, changes no turn.
        counts = self._drawn.get(name, sources.new_zeros(0))
        if len(counts) < choice.num_sources:
            counts = torch.cat([counts, counts.new_zeros(choice.num_sources - len(counts))])
        self._drawn[name] = counts
        if sources.device.type == "cpu" and native.library() is not None:
            given = {"each": each, "num_samples": num_samples, "is_minor": is_minor, "first": first}
            return RowPlaces(*native.place_chosen_rows(sources, counts, **given, turn_bits=_TURN_BITS))
        if is_minor:
            samples, own = sources % num_samples, sources // num_samples
        else:
            samples, own = sources // each, sources % each
        places = own * num_samples + samples
        turns = counts[places] + _turns(places)
        counts.index_add_(0, places, torch.ones_like(places))
        return RowPlaces((samples + first + (turns << _TURN_BITS)).contiguous(), own.contiguous())


def rows_of_pack(batch_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and the sample of each entry of packed sequences, by the samples of each step [count]: int64."""
    steps = torch.arange(len(batch_sizes)).repeat_interleave(batch_sizes)
    return steps, torch.arange(len(steps)) - (batch_sizes.cumsum(0) - batch_sizes).repeat_interleave(batch_sizes)


def row_dims(shape: Sequence[int]) -> list[int]:
    """Return the dims of a draw that may hold chosen rows: the first one, and others behind dims of one entry alone."""
    dims: list[int] = []
    for dim, size in enumerate(shape):
        dims.append(dim)
        if size != 1:
            break
    return dims


def is_around(outer: str, name: str) -> bool:
    """Tell whether a module holds another, by their names."""
    return name.startswith(f"{outer}." if outer else "")


def _turns(sources: Tensor) -> Tensor:
    """Return for each entry how many equal ones lie before it."""
    if len(sources) < 2:
        return torch.zeros_like(sources)
    ordered, order = sources.sort(stable=True)
    places = torch.arange(len(sources), device=sources.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    since = places - torch.where(begins, places, 0).cummax(0).values
    return torch.empty_like(since).index_copy_(0, order, since)
