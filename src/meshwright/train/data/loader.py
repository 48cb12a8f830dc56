"""make_loader: every rank's share of every global batch, in an order that depends only on the seed.

                      epoch's order = f(seed, epoch)
    global batch 0          global batch 1          ...   last one, perhaps smaller
    rank 0 | rank 1 | ..    rank 0 | rank 1 | ..          contiguous shares, sizes differ by at most 1, perhaps empty

Tensor and pipeline parallel ranks of one dp coordinate get the same share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from meshwright.describe.batches import HasShares
from meshwright.errors import ConfigError
from meshwright.spec.plan import Plan
from meshwright.train.data.fetch import LoadOptions, SampleReader, Share, draws_random_numbers, read_batches
from meshwright.train.data.order import epoch_order, num_batches, rank_shares
from meshwright.train.data.position import STATE_VERSION, check_position
from meshwright.train.data.streams import StreamLoader

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")

DEFAULT_MICRO_BATCH_SIZE = 8


def make_loader(
    dataset: Any,
    model: Any,
    *,
    seed: int = 0,
    global_batch_size: int | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    prefetch: int = 2,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    sample_rng: bool | None = None,
    rank_local: bool = False,
    when_uneven: Literal["continue", "stop"] = "continue",
) -> Any:
    """Return an iterable of this rank's batches; one iteration is one epoch.

    Every rank gets the same number of batches. Where a global batch has fewer samples than ranks, some get None, which
    `model.step` and `model.evaluate` take as an empty share. No sample is repeated and, unless `drop_last`, none is left out.

    Args:
        dataset: One of

            - a dataset with `__len__` and `__getitem__`;
            - an `IterableDataset` of samples, the same on every rank: each rank reads it whole and keeps its share; of several
              workers each gives every so many samples, unless the dataset itself asks `get_worker_info` for its part;
            - another iterable, a `DataLoader` for example, of ready-made global batches, the same on every rank: their size is
              the step's;
            - with `rank_local=True`, an iterable of what this rank alone trains on.
        model: What `apply_plan` returned.
        seed: Seed of the order and of the samples' random numbers.
        global_batch_size: Samples in one step over all ranks; None: the plan's micro_batch_size (or 8) x
            micro_batches x dp [samples].
        shuffle: A new order in every epoch; otherwise the dataset's.
        drop_last: Leave out an epoch's last batch where it is not full.
        num_workers: Worker processes that read samples for this rank; 0: this process [count].
        prefetch: Batches read ahead, by a thread where `num_workers` is 0 [count].
        collate_fn: Makes a batch of a list of samples; None: torch's default. Where it draws random numbers (masking, say) they
            depend on seed, epoch and the share's place alone, which a warning says where there are several shares. One that
            draws none may say so with an attribute `deterministic_samples = True`: then a thread may read ahead.
        sample_rng: Seed torch, numpy and random for every sample, from seed, epoch and index: an augmentation is then the
            same on every layout, differs from sample to sample and from epoch to epoch, and leaves the model's random
            numbers alone. It costs about 50 us a sample, and without workers nothing is read ahead. None: unless the dataset
            is a TensorDataset, a list, or has `deterministic_samples = True`.
        rank_local: Each rank brings its own batches, perhaps not equally many: the ranks agree before each step.
        when_uneven: With `rank_local`, "continue" until no rank has a batch, or "stop" when one has none.

    Returns:
        A loader. `len()` is the number of steps in an epoch; `state_dict()` and `load_state_dict()` hold the position
        after the last batch handed out, whatever was read ahead, and can be loaded under another plan; `set_epoch()`.

    Raises:
        ConfigError: An argument is out of range, the dataset is empty, or a `DataLoader` makes batches of another size.
    """
    _check_ready_made(dataset, None if rank_local else global_batch_size)
    size = global_batch_size if global_batch_size is not None else default_global_batch_size(model.plan)
    for name, value, least in (
        ("global_batch_size", size, 1),
        ("num_workers", num_workers, 0),
        ("prefetch", prefetch, 0),
    ):
        if value < least:
            raise ConfigError(f"make_loader: {name}={value} (rule: at least {least})")
    if when_uneven not in ("continue", "stop"):
        raise ConfigError(f"make_loader: when_uneven={when_uneven!r} (rule: 'continue' or 'stop')")
    options = LoadOptions(
        seed=seed,
        global_batch_size=size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        prefetch=prefetch,
        collate_fn=collate_fn,
        sample_rng=sample_rng,
        rank_local=rank_local,
        when_uneven=when_uneven,
    )
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if rank_local or not is_indexed or isinstance(dataset, DataLoader | IterableDataset):
        return StreamLoader(dataset, model, options)
    return IndexedLoader(dataset, model, options)


def _check_ready_made(dataset: Any, global_batch_size: int | None) -> None:
    made = dataset.batch_size if isinstance(dataset, DataLoader) else None  # None of a batch_sampler, too
    if global_batch_size is not None and made is not None and made != global_batch_size:
        raise ConfigError(
            f"make_loader: global_batch_size={global_batch_size}, and the DataLoader makes global batches of {made} samples "
            "(rule: equal; ready-made batches are not put together anew)",
            fix=f"its dataset instead of the DataLoader, or global_batch_size={made}",
        )


def default_global_batch_size(plan: Plan) -> int:
    """Return the default number of samples in one step [count]."""
    return (plan.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE) * plan.micro_batches * plan.num_shares


class IndexedLoader:
    """Batches of a dataset with `__len__` and `__getitem__`; see `make_loader`."""

    def __init__(self, dataset: Any, model: HasShares, options: LoadOptions) -> None:
        self.dataset = dataset
        self.global_batch_size = options.global_batch_size
        self.seed = options.seed
        self.epoch = 0
        self._model = model
        self._options = options
        self._seeds_samples = draws_random_numbers(dataset) if options.sample_rng is None else options.sample_rng
        self._batch = 0
        self._samples = 0
        self._is_fresh = True
        self._is_loaded = False
        self._stays = False
        if len(self) == 0:
            raise ConfigError(
                f"make_loader: a dataset of {len(dataset)} samples gives no batch of {self.global_batch_size} "
                f"(drop_last={options.drop_last}; rule: an epoch has at least one batch)",
                fix="drop_last=False, or a smaller global_batch_size" if len(dataset) else None,
            )
        if self.global_batch_size > len(dataset) and model.dp_rank == 0:
            _LOG.warning(
                "make_loader: global_batch_size=%d of a dataset of %d samples: every step has %d. Fix: global_batch_size=%d",
                *(self.global_batch_size, *[len(dataset)] * 3),
            )

    def __len__(self) -> int:
        return num_batches(len(self.dataset), self.global_batch_size, drop_last=self._options.drop_last)

    def __iter__(self) -> Generator[Any]:
        if not self._is_fresh or (self._batch >= len(self) and not self._stays):
            self._begin(self.epoch + 1)
        self._is_fresh = self._is_loaded = self._stays = False
        order = epoch_order(len(self.dataset), self.seed, self.epoch, shuffle=self._options.shuffle)
        shares = list(
            rank_shares(
                order,
                self._samples,
                self.global_batch_size,
                self._model.dp_rank,
                self._model.dp_size,
                drop_last=self._options.drop_last,
            )
        )
        return self._iterate(shares)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration. Without it each iteration begins the next one by itself.

        The epoch of a position that was just loaded is continued there, not begun; where it was at its end, nothing is left.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch({epoch}) (rule: at least 0)")
        self._stays = self._is_loaded and epoch == self.epoch
        if self._stays:
            return
        self._begin(epoch)
        self._is_fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out. Call it between steps."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self._batch,
            "samples": self._samples,
            "dataset_length": len(self.dataset),
            "shuffle": self._options.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next iteration, where `state_dict` was taken: the same samples in the same order.

        The number of ranks and the global batch size may have changed since.

        Raises:
            ConfigError: The state is of another dataset, order or version, or none that `state_dict` returns.
        """
        check_position(state, {"dataset_length": None, "epoch": None, "samples": None}, ("shuffle",))
        if state["dataset_length"] != len(self.dataset):
            raise ConfigError(
                f"the loader's state is of a dataset with {state['dataset_length']} samples, this one has "
                f"{len(self.dataset)} (rule: the data is the same, or the order would not be)"
            )
        if state["shuffle"] != self._options.shuffle:
            raise ConfigError(f"the loader's state has shuffle={state['shuffle']}, this loader {self._options.shuffle}")
        check_position(state, {"samples": len(self.dataset)})
        if type(state.get("seed")) is not int:
            raise ConfigError(f"the loader's state has seed={state.get('seed')!r:.60} (rule: a whole number)")
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._samples = state["samples"]
        self._batch = len(self) if self._is_at_end() else -(-self._samples // self.global_batch_size)
        self._is_fresh = self._is_loaded = True
        self._stays = False

    def _is_at_end(self) -> bool:
        left = len(self.dataset) - self._samples
        return left < (self.global_batch_size if self._options.drop_last else 1)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._batch, self._samples = epoch, 0, 0

    def _iterate(self, shares: list[tuple[int, Share]]) -> Generator[Any]:
        key = (self.seed, self.epoch)
        tells = self._model.dp_size > 1
        reader = SampleReader(
            self.dataset, self._options.collate_fn, key, seeds_samples=self._seeds_samples, tells_draws=tells
        )
        batches = read_batches(
            reader,
            [share for _, share in shares],
            num_workers=self._options.num_workers,
            prefetch=self._options.prefetch,
            rank=self._model.dp_rank,
        )
        try:
            for (num_samples, _), batch in zip(shares, batches, strict=True):
                # Counted before it is handed out: code that asks for the state next has trained on it.
                self._batch += 1
                self._samples += num_samples
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
