"""Streams of batches: iterable datasets, ready-made batches, and batches that each rank brings itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from meshwright._torch_private import set_worker_info
from meshwright.errors import ConfigError
from meshwright.layout import even_ranges, even_sizes
from meshwright.train.data.fetch import (
    OF_COLLATE,
    OF_STREAM,
    LoadOptions,
    isolated_rng,
    may_draw,
    read_ahead,
    seed_everything,
    seeded_collate,
    until_closed,
    worker_generator,
)
from meshwright.train.data.order import mix
from meshwright.train.data.position import STATE_VERSION, check_position

__all__: list[str] = []

_END = object()  # None is a batch: an empty share


class EachOnce(IterableDataset[Any]):
    """A stream that gives each sample once, however many workers read it: worker i of n gives every n-th.

    A dataset that calls `torch.utils.data.get_worker_info` before its first sample divides itself, and is left to that.
    """

    def __init__(self, stream: IterableDataset[Any]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from self.stream
            return
        asked = _WorkerInfoWatch(info)
        set_worker_info(asked)  # for good: this process reads nothing else
        shares_out = False
        for place, sample in enumerate(self.stream):
            if place == 0:
                shares_out = asked.was_asked
            elif asked.was_asked and not shares_out:
                raise ConfigError(
                    f"make_loader: the {type(self.stream).__name__} asked for its worker's number after its first sample, so "
                    f"that it is not known which samples {info.num_workers} workers give (rule: each sample once)",
                    fix="num_workers=1, or ask get_worker_info() at the start of __iter__",
                )
            if shares_out or place % info.num_workers == info.id:
                yield sample


class _WorkerInfoWatch:
    """Replaces a worker's info, and records whether code asked for the worker's number."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self.was_asked = False

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.was_asked = True
        return getattr(self._info, name)


class StreamLoader:
    """Batches of something that can only be iterated; see `make_loader`. Its length is not known.

    A stream that is the same on every rank ends everywhere at once. One of each rank's own does not: before each step the
    ranks agree, in one small all-reduce, whether anyone (or, to stop early, everyone) has a batch.
    """

    def __init__(self, source: Iterable[Any], model: Any, options: LoadOptions) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(
                f"make_loader: a {type(source).__name__} is neither indexed (__len__ and __getitem__) nor iterable",
                fix="pass a dataset, a DataLoader, or an iterable of samples or batches",
            )
        if options.num_workers and not isinstance(source, IterableDataset):
            raise ConfigError(
                f"make_loader: num_workers={options.num_workers} with ready-made batches (rule: who makes them reads them)",
                fix="give num_workers to the DataLoader that makes the batches",
            )
        self.source = source
        self.global_batch_size = options.global_batch_size
        self._model = model
        self._options = options
        self._collate: Callable[[Any], Any] = options.collate_fn or default_collate
        self._rank_local = options.rank_local
        self.epoch = 0
        self._batch = 0
        self._is_fresh = True
        self._is_loaded = False
        self._has_begun = False
        self._has_given = False

    def __iter__(self) -> Generator[Any]:
        if self._has_begun and isinstance(self.source, Iterator):
            raise ConfigError(
                f"make_loader: a {type(self.source).__name__} can be iterated once, and this is the second time (rule: an "
                "epoch that begins anew reads the data anew)",
                fix="pass something whose iter() begins anew: a list, a DataLoader, or a class with __iter__",
            )
        if not self._is_fresh:
            self.epoch, self._batch = self.epoch + 1, 0
        self._is_fresh = self._is_loaded = False
        self._has_begun = True
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return self._iterate(self._batch)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration; handed on to a source that has a `set_epoch` of its own.

        The epoch of a position that was just loaded is continued there.
        """
        if self._is_loaded and epoch == self.epoch:
            return
        self.epoch, self._batch, self._is_fresh = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out."""
        position = {"version": STATE_VERSION, "epoch": self.epoch, "batch": self._batch}
        return position | ({"global_batch_size": self.global_batch_size} if self._makes_batches else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at this position at the next iteration. What comes before it is read and thrown away.

        Raises:
            ConfigError: The state is none of a stream, or ends inside of a batch of this loader's size.
        """
        check_position(state, {"epoch": None, "batch": None})
        if "dataset_length" in state:
            raise ConfigError("the loader's state is of an indexed dataset, this one is a stream")
        self.epoch, self._batch, self._is_fresh = state["epoch"], self._place_of(state), True
        self._is_loaded = True

    @property
    def _makes_batches(self) -> bool:
        return isinstance(self.source, IterableDataset) and not self._rank_local

    def _place_of(self, state: Mapping[str, Any]) -> int:
        """Return the batches of this loader's size before a position [count]; samples are what the size does not change."""
        if not self._makes_batches or "global_batch_size" not in state:  # as before 2026-12
            return state["batch"]
        check_position(state, {"global_batch_size": None})
        samples = state["batch"] * state["global_batch_size"]
        if samples % self.global_batch_size:
            raise ConfigError(
                f"the loader's state is {samples} samples into its stream, which is inside of a batch of "
                f"{self.global_batch_size} (rule: a stream goes on where a batch begins)",
                fix=f"global_batch_size={state['global_batch_size']}, as before",
            )
        return samples // self.global_batch_size

    def _iterate(self, skip: int) -> Generator[Any]:
        batches = itertools.islice(self._own_batches(), skip, None)
        ahead = read_ahead(batches, self._options.prefetch) if self._reads_ahead() else None
        try:
            shares = self._taken(ahead or batches)
            for batch in self._agreed(shares) if self._rank_local else shares:
                self._batch += 1
                yield batch
        finally:
            if ahead is not None:
                ahead.close()

    def _taken(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[Any]:
        """Yield shares, and have what they were cut from compared once they are handed out, however far a thread has read."""
        watch = self._model.splitter.watch
        for share, mark in batches:
            if watch is not None:
                watch.take(mark)
            yield share

    def _mark(self, whole: Any) -> Any:
        watch = self._model.splitter.watch
        return None if watch is None or self._rank_local else watch.mark(whole)

    def _reads_ahead(self) -> bool:
        # Other people's iterables may draw random numbers, which a thread would take from the model; workers do not.
        return bool(self._options.prefetch) and self._draws_nothing() and not may_draw(self._collate)

    def _draws_nothing(self) -> bool:
        return getattr(self.source, "deterministic_samples", False)

    def _own_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's shares, each with the mark of what it was cut from."""
        if isinstance(self.source, IterableDataset):
            yield from self._cut_stream(self.source)
        elif self._rank_local:
            yield from ((batch, None) for batch in self.source)
        else:
            model = self._model
            for (batch,) in self._at_once(self.source, 1):
                shares = model.splitter.cut(batch, model.dp_size)
                yield shares[model.dp_rank] if model.dp_rank < len(shares) else None, self._mark(batch)

    def _cut_stream(self, stream: IterableDataset[Any]) -> Iterator[tuple[Any, Any]]:
        samples: Iterable[Any] = stream
        rank, ranks = self._model.dp_rank, self._model.dp_size
        if self._options.num_workers:
            generator = worker_generator(self._options.seed, self.epoch, rank if self._rank_local else 0)
            loader = DataLoader(
                EachOnce(stream), batch_size=None, num_workers=self._options.num_workers, generator=generator
            )
            samples = until_closed(loader)
        size = even_sizes(self.global_batch_size, ranks)[rank] if self._rank_local else self.global_batch_size
        if size == 0:
            return
        for place, chunk in enumerate(self._at_once(samples, size)):
            if self._options.drop_last and len(chunk) < size:
                return
            low, high = (0, len(chunk)) if self._rank_local else even_ranges(len(chunk), ranks)[rank]
            seed = mix(self._options.seed, self.epoch, OF_COLLATE, place, rank)
            tells = ranks > 1 and rank == place == self.epoch == 0 and not self._rank_local
            share = seeded_collate(self._collate, chunk[low:high], seed, tells=tells) if high > low else None
            yield share, self._mark([chunk[0], chunk[-1]])  # a stream that gives each rank its own differs there

    def _at_once(self, source: Iterable[Any], size: int) -> Iterator[list[Any]]:
        """Yield the items of the source, `size` at once; its draws are the same on all ranks, unless it is a rank's own.

        A sampler that shuffles by torch's generator, for example, would have another order on each rank.
        """
        is_seeded = not (self._rank_local or type(source) in (list, tuple) or self._draws_nothing())
        iterator: Iterator[Any] | None = None
        for place in itertools.count():
            with isolated_rng() if is_seeded else contextlib.nullcontext():
                if is_seeded:
                    seed_everything(mix(self._options.seed, self.epoch, OF_STREAM, place))
                iterator = iter(source) if iterator is None else iterator
                chunk = list(itertools.islice(iterator, size))
            if not chunk:
                self._require_some(place)
                return
            self._has_given = True
            yield chunk

    def _require_some(self, place: int) -> None:
        if place == 0 and self._has_given and not self._rank_local:
            raise ConfigError(
                f"make_loader: the {type(self.source).__name__} gave nothing in epoch {self.epoch}, and something before "
                "(rule: an epoch reads the data anew)",
                fix="have its __iter__ begin anew each time, not hand out what is left",
            )

    def _agreed(self, batches: Iterable[Any]) -> Iterator[Any]:
        world = self._model.world
        iterator = iter(batches)
        while True:
            batch = next(iterator, _END)
            present = torch.tensor([batch is not _END], dtype=torch.int32, device=world.device)
            world.default_group.all_reduce(present, "max" if self._options.when_uneven == "continue" else "min")
            if not int(present):
                return
            yield None if batch is _END else batch
