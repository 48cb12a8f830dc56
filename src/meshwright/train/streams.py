"""Batches that come one after the other: iterable datasets, ready-made batches, and what each rank brings by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from meshwright.describe.tree import split_sizes
from meshwright.errors import ConfigError
from meshwright.run.batch import split_batch
from meshwright.train.fetch import read_ahead
from meshwright.train.order import share_bounds

__all__: list[str] = []

_END = object()  # None is a batch: an empty share


class StreamLoader:
    """Batches of something that can only be iterated; see `make_loader`. Its length is not known.

    A stream that is the same on every rank ends everywhere at once. One of each rank's own does not: before each step the
    ranks agree, in one small all-reduce, whether anyone (or, to stop early, everyone) has a batch.
    """

    def __init__(
        self,
        source: Iterable[Any],
        model: Any,
        *,
        global_batch_size: int,
        drop_last: bool,
        num_workers: int,
        prefetch: int,
        collate_fn: Callable[[Sequence[Any]], Any] | None,
        rank_local: bool,
        when_uneven: str,
    ) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(
                f"make_loader: a {type(source).__name__} is neither indexed (__len__ and __getitem__) nor iterable"
            )
        if num_workers and not isinstance(source, IterableDataset):
            raise ConfigError(
                f"make_loader: num_workers={num_workers} with ready-made batches (rule: who makes them reads them)",
                fix="give num_workers to the DataLoader that makes the batches",
            )
        self.source = source
        self.global_batch_size = global_batch_size
        self._model = model
        self._drop_last = drop_last
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._collate = collate_fn or default_collate
        self._rank_local = rank_local
        self._when_uneven = when_uneven
        self.epoch = 0
        self._batch = 0
        self._is_fresh = True

    def __iter__(self) -> Generator[Any]:
        if not self._is_fresh:
            self.epoch, self._batch = self.epoch + 1, 0
        self._is_fresh = False
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return self._iterate(self._batch)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration; handed on to a source that has a `set_epoch` of its own."""
        self.epoch, self._batch, self._is_fresh = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out."""
        return {"version": 1, "epoch": self.epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at this position at the next iteration. What comes before it is read and thrown away."""
        if set(state) != {"version", "epoch", "batch"}:
            raise ConfigError("the loader's state is of an indexed dataset, this one is a stream")
        self.epoch, self._batch, self._is_fresh = state["epoch"], state["batch"], True

    def _iterate(self, skip: int) -> Generator[Any]:
        batches = itertools.islice(self._own_batches(), skip, None)
        ahead = read_ahead(batches, self._prefetch) if self._reads_ahead() else None
        try:
            for batch in self._agreed(ahead or batches) if self._rank_local else ahead or batches:
                self._batch += 1
                yield batch
        finally:
            if ahead is not None:
                ahead.close()

    def _reads_ahead(self) -> bool:
        # Other people's iterables may draw random numbers, which a thread would take from the model; workers do not.
        return bool(self._prefetch) and getattr(self.source, "deterministic_samples", False)

    def _own_batches(self) -> Iterator[Any]:
        if isinstance(self.source, IterableDataset):
            yield from self._cut_stream(self.source)
        elif self._rank_local:
            yield from self.source
        else:
            for batch in self.source:
                yield split_batch(batch, self._model)

    def _cut_stream(self, stream: IterableDataset[Any]) -> Iterator[Any]:
        samples: Iterable[Any] = stream
        if self._num_workers:
            generator = torch.Generator().manual_seed(self.epoch)
            samples = DataLoader(stream, batch_size=None, num_workers=self._num_workers, generator=generator)
        rank, ranks = self._model.dp_rank, self._model.dp_size
        size = split_sizes(self.global_batch_size, ranks)[rank] if self._rank_local else self.global_batch_size
        if size == 0:
            return
        iterator = iter(samples)
        while chunk := list(itertools.islice(iterator, size)):
            if self._drop_last and len(chunk) < size:
                return
            low, high = (0, len(chunk)) if self._rank_local else share_bounds(len(chunk), rank, ranks)
            yield self._collate(chunk[low:high]) if high > low else None

    def _agreed(self, batches: Iterable[Any]) -> Iterator[Any]:
        world = self._model.world
        iterator = iter(batches)
        while True:
            batch = next(iterator, _END)
            present = torch.tensor([batch is not _END], dtype=torch.int32, device=world.device)
            world.default_group.all_reduce(present, "max" if self._when_uneven == "continue" else "min")
            if not int(present):
                return
            yield None if batch is _END else batch
