"""Reading samples: at once, ahead of time in a thread, or in torch's worker processes; with or without random numbers.

What reads ahead ends with the iterator that it reads for: when that is exhausted, closed, or garbage collected.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from meshwright.train.order import mix

__all__: list[str] = []


class SampleReader(Dataset[Any]):
    """Reads samples by index, and says which one it was where that fails.

    Args:
        dataset: The user's dataset.
        collate: Makes a batch of a list of samples; None: torch's default.
        rng_key: With it, torch, numpy and random are seeded for every sample from the key and the sample's index, so that an
            augmentation depends neither on the rank nor on the worker that makes it. Costs about 50 us a sample.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Sequence[Any]], Any] | None, rng_key: tuple[int, ...] | None
    ) -> None:
        self.dataset = dataset
        self.collate: Callable[[Any], Any] = collate or default_collate
        self.rng_key = rng_key

    def __getitem__(self, index: int) -> Any:
        if self.rng_key is not None:
            seed_everything(mix(*self.rng_key, index))
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"raised by dataset[{index}] of {type(self.dataset).__name__}, while a batch was read")
            raise

    def collate_or_none(self, samples: Sequence[Any]) -> Any:
        """Return the samples as a batch; None for an empty share."""
        return self.collate(samples) if samples else None

    def read(self, indices: Sequence[int]) -> Any:
        """Return the batch of these samples. The caller's random state is as it was afterwards."""
        if not indices:
            return None
        with isolated_rng() if self.rng_key is not None else contextlib.nullcontext():
            return self.collate([self[index] for index in indices])


def draws_random_numbers(dataset: Any) -> bool:
    """Tell whether a dataset's samples may depend on random state: true unless it is known that they do not."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset | list | tuple | range):
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
    """Put the random state of torch's CPU generator, numpy and random back afterwards."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def read_batches(
    reader: SampleReader, shares: Sequence[list[int]], *, num_workers: int, prefetch: int
) -> Iterator[Any]:
    """Yield a batch, or None, for each share.

    Args:
        reader: Reads samples.
        shares: The sample indices of each batch; an empty one yields None.
        num_workers: Worker processes; 0: this process.
        prefetch: Batches read ahead by a thread, or by each worker; 0: none.
    """
    if num_workers > 0:
        return _read_in_workers(reader, shares, num_workers, prefetch)
    if prefetch > 0 and reader.rng_key is None:
        return read_ahead(map(reader.read, shares), prefetch)
    # Seeding in a thread would change the numbers that the model draws meanwhile, dropout for example.
    return map(reader.read, shares)


def _read_in_workers(
    reader: SampleReader, shares: Sequence[list[int]], num_workers: int, prefetch: int
) -> Iterator[Any]:
    loader = DataLoader(
        reader,
        batch_sampler=shares,
        num_workers=num_workers,
        prefetch_factor=max(1, prefetch),
        collate_fn=reader.collate_or_none,
        # Without one of its own it would take a number from the model's generator.
        generator=torch.Generator().manual_seed(mix(*(reader.rng_key or ()))),
    )
    batches = iter(loader)
    try:
        yield from batches
    finally:
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def read_ahead(source: Iterator[Any], depth: int) -> Generator[Any]:
    """Yield what the source yields, up to `depth` items being read ahead by a thread.

    An exception of the source is raised here, in its place. The thread ends before this generator's `close` returns;
    where the source is stuck, it is waited for.
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
