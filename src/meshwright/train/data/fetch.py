"""Reading of samples: at once, ahead in a thread, or in torch's worker processes; with or without random numbers.

A thread or worker that reads ahead ends with its iterator: when that is exhausted, closed, or garbage collected.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from meshwright.python_state import PythonState, kept_python_state
from meshwright.train.data.order import mix

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")

# Third words of seeds, so that no two users of random numbers get the same ones.
_OF_SAMPLES, OF_COLLATE, _OF_WORKERS, OF_STREAM = 1, 2, 3, 4


Share = tuple[int, list[int]]
"""Where a share begins in its epoch's order [samples], and the indices of its samples."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Arguments of `make_loader`, which explains them, as its loaders use them."""

    seed: int
    global_batch_size: int
    shuffle: bool
    drop_last: bool
    num_workers: int
    prefetch: int
    collate_fn: Callable[[Sequence[Any]], Any] | None
    sample_rng: bool | None
    rank_local: bool
    when_uneven: Literal["continue", "stop"]


class SampleReader(Dataset[Any]):
    """Reads shares of batches by the samples' indices, and names the sample if one fails.

    A sample's random numbers do not depend on the rank or the worker that reads it. Those of `collate` depend only on the share's
    position. So ranks that share layers get the same batch, whatever is read ahead.

    Args:
        dataset: The user's dataset.
        collate: Makes a batch of a list of samples; None: torch's default.
        key: The seed and the epoch.
        seeds_samples: Whether to seed torch, numpy and random for every sample, from the key and the sample's index. Costs
            about 50 us a sample.
        tells_draws: Whether to warn where `collate` draws for a share of the first batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Any] | None,
        key: tuple[int, int],
        *,
        seeds_samples: bool,
        tells_draws: bool = False,
    ) -> None:
        self.dataset = dataset
        self.tells_draws = tells_draws
        self.collate: Callable[[Any], Any] = collate or default_collate
        self.key = key
        self.seeds_samples = seeds_samples
        self.seeds_collate = may_draw(collate)

    @property
    def draws_nothing(self) -> bool:
        """Whether it is known that reading takes no random number."""
        return not self.seeds_collate and not draws_random_numbers(self.dataset)

    def __getitem__(self, share: Share) -> Any:
        """Return the batch of these samples, or None. The caller's random state is restored."""
        start, indices = share
        if not indices:
            return None
        # Unseeded samples continue with the generators as they are: if restored, each batch would draw the same.
        with isolated_rng() if self.seeds_samples else contextlib.nullcontext():
            try:
                samples = [self._sample(index) for index in indices]
                tells = self.tells_draws and start == 0 and self.key[1] == 0  # the first share of all
                return seeded_collate(self.collate, samples, mix(*self.key, OF_COLLATE, start), tells=tells)
            except StopIteration as error:  # the batches would seem to end here; as in a generator (PEP 479)
                name = type(self.dataset).__name__
                raise RuntimeError(
                    f"the dataset {name}, or collate, raised StopIteration while a batch was read"
                ) from error

    def _sample(self, index: int) -> Any:
        if self.seeds_samples:
            seed_everything(mix(*self.key, _OF_SAMPLES, index))
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"raised by dataset[{index}] of {type(self.dataset).__name__}, while a batch was read")
            raise


def seeded_collate(collate: Callable[[Any], Any], samples: Sequence[Any], seed: int, *, tells: bool = False) -> Any:
    """Return the batch of these samples; where the function may draw, under a seed of its own.

    Args:
        collate: The function.
        samples: The samples of this rank's share.
        seed: The seed.
        tells: Whether to warn where the function draws: of several ranks, each draws for its own share.
    """
    if not may_draw(collate):
        return collate(samples)
    with isolated_rng():
        seed_everything(seed)
        before = (torch.default_generator.get_state(), PythonState()) if tells else None
        batch = collate(samples)
        if before is not None and (
            before[1].has_moved() or not torch.equal(before[0], torch.default_generator.get_state())
        ):
            _LOG.warning(
                "make_loader: collate_fn draws random numbers (masks, mixing), for each rank's share: other ones than one "
                "device's. Fix: hand over a DataLoader of whole batches, DataLoader(dataset, batch_size, collate_fn=...), or "
                "draw in the dataset's __getitem__"
            )
        return batch


def may_draw(collate: Callable[[Sequence[Any]], Any] | None) -> bool:
    """Tell whether a collate function may draw random numbers: true unless it is torch's or has `deterministic_samples`."""
    return collate not in (None, default_collate) and not getattr(collate, "deterministic_samples", False)


def draws_random_numbers(dataset: Any) -> bool:
    """Tell whether a dataset's samples may depend on random state: true unless it is known that they do not."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    reads = getattr(type(dataset), "__getitem__", None)
    if reads in (TensorDataset.__getitem__, list.__getitem__, tuple.__getitem__, range.__getitem__):
        return False
    return not getattr(dataset, "deterministic_samples", False)


def seed_everything(seed: int) -> None:
    """Seed torch's CPU generator, numpy and random."""
    # The CPU generator alone: torch.manual_seed would also reseed every GPU, where the model draws from.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextlib.contextmanager
def isolated_rng() -> Generator[None]:
    """Restore the random state of torch's CPU generator, numpy and random after the context."""
    state = torch.default_generator.get_state()
    with kept_python_state():
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def read_batches(
    reader: SampleReader, shares: Sequence[Share], *, num_workers: int, prefetch: int, rank: int = 0
) -> Iterator[Any]:
    """Yield a batch, or None, for each share.

    Args:
        reader: Reads shares.
        shares: The shares; an empty one yields None.
        num_workers: Worker processes; 0: this process.
        prefetch: Batches read ahead by a thread, or by each worker; 0: none.
        rank: This rank's number among those with other shares; unseeded draws of workers differ by it.
    """
    if num_workers > 0:
        return _read_in_workers(reader, shares, num_workers, prefetch, rank)
    if prefetch > 0 and reader.draws_nothing:
        return read_ahead(map(reader.__getitem__, shares), prefetch)
    # In a thread, what is drawn would be taken from the numbers that the model draws meanwhile, dropout for example.
    return map(reader.__getitem__, shares)


def _read_in_workers(
    reader: SampleReader, shares: Sequence[Share], num_workers: int, prefetch: int, rank: int
) -> Iterator[Any]:
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=shares,
        num_workers=num_workers,
        prefetch_factor=max(1, prefetch),
        collate_fn=_as_it_is,
        generator=worker_generator(*reader.key, rank),
    )
    yield from until_closed(loader)


def until_closed(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield what the loader yields, and end its workers with this iterator or its error."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def worker_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """Return the generator from which a DataLoader seeds its workers, different in each epoch; the model's is left alone."""
    return torch.Generator().manual_seed(mix(seed, epoch, _OF_WORKERS, rank))


def _as_it_is(batch: Any) -> Any:
    return batch


def read_ahead(source: Iterator[Any], depth: int) -> Generator[Any]:
    """Yield what the source yields, up to `depth` items being read ahead by a thread.

    An exception of the source is raised here, at its position. The thread ends before this generator's `close` returns, which
    waits for a source that is stuck.
    """
    ahead = _Ahead(source, depth)
    thread = threading.Thread(target=ahead.run, name="meshwright-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error, ended = ahead.take()
            if error is not None:
                raise error
            if ended:
                return
            yield item
    finally:
        ahead.stop()
        thread.join()


class _Ahead:
    """The thread's side and the reader's side of one queue. It knows nothing of the generator, which may be collected."""

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self._source = source
        self._depth = depth
        self._items: collections.deque[tuple[Any, BaseException | None, bool]] = collections.deque()
        self._changed = threading.Condition()
        self._is_stopped = False

    def run(self) -> None:
        ended = False
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or len(self._items) < self._depth)
                if self._is_stopped:
                    return
            try:
                entry = (next(self._source), None, False)
            except StopIteration:
                entry = (None, None, True)
            except BaseException as error:  # noqa: BLE001 - raised again where the batch is asked for
                entry = (None, error, True)
            ended = entry[2]
            with self._changed:
                self._items.append(entry)
                self._changed.notify_all()

    def take(self) -> tuple[Any, BaseException | None, bool]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            entry = self._items.popleft()
            self._changed.notify_all()
            return entry

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._items.clear()
            self._changed.notify_all()
