"""train/: what a collate function or a stream draws, positions that are continued, and samples that come once."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.train.loading import Numbers, fake_model, joined, together
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from meshwright.errors import ConfigError
from meshwright.train.data.fetch import draws_random_numbers, may_draw
from meshwright.train.data.loader import make_loader

# -- collate functions that draw ------------------------------------------------------------------------------------------


def masking(samples: list[Any]) -> torch.Tensor:
    """One draw from each generator for each sample, beside its number."""
    rows = [[float(sample), torch.rand(()).item(), np.random.rand(), random.random()] for sample in samples]
    return torch.tensor(rows, dtype=torch.float64)


def masked(dataset: Any = None, *, rank: int = 0, size: int = 1, epochs: int = 1, **kwargs: Any) -> torch.Tensor:
    loader = make_loader(
        list(range(8)) if dataset is None else dataset,
        fake_model(rank, size),
        global_batch_size=4,
        collate_fn=masking,
        **kwargs,
    )
    found = []
    for _ in range(epochs):
        for batch in loader:
            torch.rand(3), np.random.rand(), random.random()  # what a model draws meanwhile
            found.append(batch)
    return torch.cat(found)


@pytest.mark.parametrize("dataset", [None, Numbers(8), TensorDataset(torch.arange(8))], ids=["list", "map", "tensors"])
def test_what_a_collate_function_draws_depends_on_the_seed_alone(dataset: Any) -> None:
    if isinstance(dataset, TensorDataset):
        dataset = [row[0] for row in dataset]
    torch.manual_seed(1)
    first = masked(dataset, epochs=2)
    torch.manual_seed(2)
    random.seed(2)
    assert torch.equal(masked(dataset, epochs=2, prefetch=0), first)
    assert torch.equal(masked(dataset, epochs=2, num_workers=1), first)
    assert torch.unique(first[:, 1:]).numel() == first[:, 1:].numel()  # other numbers in each batch and epoch
    assert not set(masked(dataset, seed=1)[:, 1:].flatten().tolist()) & set(first[:, 1:].flatten().tolist())
    shares = [masked(dataset, rank=rank, size=2) for rank in range(2)]
    assert torch.equal(masked(dataset, rank=1, size=2), shares[1])  # ranks that share layers
    assert not set(shares[0][:, 1:].flatten().tolist()) & set(shares[1][:, 1:].flatten().tolist())


def test_a_collate_function_leaves_the_models_random_numbers_alone() -> None:
    torch.manual_seed(5)
    for _ in make_loader(list(range(8)), fake_model(), global_batch_size=4, collate_fn=masking):
        pass
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(torch.rand(()), drawn)


def test_samples_that_nobody_seeds_are_no_repetition() -> None:
    class Noise(Numbers):
        deterministic_samples = False

        def __getitem__(self, index: int) -> Any:
            return torch.rand(()).item()

    numbers = masked(Noise(8), sample_rng=False)[:, 0]
    assert torch.unique(numbers).numel() == 8


def test_a_position_in_the_middle_draws_what_the_epoch_would_have_drawn() -> None:
    loader = make_loader(list(range(12)), fake_model(), global_batch_size=4, collate_fn=masking)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    other = make_loader(list(range(12)), fake_model(), global_batch_size=4, collate_fn=masking)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(other, rest, strict=True))


def test_what_may_draw_is_known() -> None:
    assert not may_draw(None)
    assert not may_draw(torch.utils.data.default_collate)
    assert may_draw(masking)

    class Reversed(list):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(-index)

    class Noisy(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(())

    assert draws_random_numbers(Reversed([1]))
    assert draws_random_numbers(Noisy(torch.zeros(3)))
    assert not draws_random_numbers([1])


class WorkerDraws(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_draw_other_numbers_in_each_epoch_and_on_each_rank() -> None:
    def numbers(rank: int, size: int) -> list[list[float]]:
        loader = make_loader(
            WorkerDraws(), fake_model(rank, size), sample_rng=False, num_workers=1, global_batch_size=4, seed=3
        )
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, again = numbers(0, 2), numbers(0, 2)
    assert first == again
    assert not {*first[0], *numbers(1, 2)[0]} & set(first[1])
    assert not set(first[0]) & set(numbers(1, 2)[0])


# -- positions ------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


@pytest.mark.parametrize("dataset", [Numbers(16), Stream(16)], ids=["indexed", "stream"])
def test_set_epoch_keeps_a_position_that_was_loaded(dataset: Any) -> None:
    loader = make_loader(dataset, fake_model(), global_batch_size=4)
    loader.set_epoch(3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    assert len(rest) == 2
    other = make_loader(dataset, fake_model(), global_batch_size=4)
    other.load_state_dict(state)
    other.set_epoch(state["epoch"])
    assert [batch.tolist() for batch in other] == rest
    other.set_epoch(3)  # now it is meant
    assert len(list(other)) == 4
    other.load_state_dict(state)
    other.set_epoch(4)
    assert len(list(other)) == 4


def test_a_loop_over_epochs_continues_after_an_epochs_last_batch() -> None:
    loader = make_loader(Numbers(8), fake_model(), global_batch_size=4)
    assert len(list(loader)) == 2
    state = loader.state_dict()
    other = make_loader(Numbers(8), fake_model(), global_batch_size=4)
    other.load_state_dict(state)
    counts = []
    for epoch in range(state["epoch"], 3):
        other.set_epoch(epoch)
        counts.append(len(list(other)))
    assert counts == [0, 2, 2]
    other.load_state_dict(state)
    assert len(list(other)) == 2  # without set_epoch the next one begins


# -- streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_local", [False, True])
def test_an_iterator_has_one_epoch(rank_local: bool) -> None:
    group = type("Group", (), {"all_reduce": lambda self, tensor, op: None})()
    source = iter([torch.arange(4), torch.arange(4)])
    loader = make_loader(source, fake_model(group=group), rank_local=rank_local)
    assert len(list(loader)) == 2
    with pytest.raises(ConfigError, match="can be iterated once") as caught:
        next(iter(loader))
    assert "begins anew" in (caught.value.fix or "")


def test_a_stream_that_is_used_up_is_refused_in_its_second_epoch() -> None:
    class Rest(IterableDataset[int]):
        def __init__(self) -> None:
            self.left = iter(range(8))

        def __iter__(self) -> Any:
            return self.left

    loader = make_loader(Rest(), fake_model(), global_batch_size=4)
    assert len(list(loader)) == 2
    with pytest.raises(ConfigError, match="gave nothing in epoch 1"):
        list(loader)


class Sharing(IterableDataset[int]):
    """Shares itself out between workers, as torch's documentation says."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(range(10)) if info is None else iter(range(info.id, 10, info.num_workers))


class Late(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 0
        info = get_worker_info()
        yield 1 if info is None else info.id


@pytest.mark.parametrize("stream", [Stream(10), Sharing()])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_each_sample_of_a_stream_once(stream: Any, num_workers: int) -> None:
    shares = [
        [
            batch.tolist()
            for batch in make_loader(stream, fake_model(rank, 2), global_batch_size=4, num_workers=num_workers)
        ]
        for rank in range(2)
    ]
    assert together(shares) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_stream_that_asks_for_its_worker_late_is_refused() -> None:
    with pytest.raises(ConfigError, match="after its first sample"):
        list(make_loader(Late(), fake_model(), global_batch_size=2, num_workers=2))


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Any:
        order = list(range(8))
        random.shuffle(order)
        return iter(order)


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_an_order_that_the_source_draws_is_the_same_on_all_ranks(kind: str) -> None:
    # Ranks with other shares draw other numbers: each would shuffle by itself, and take the first half of its own order.
    def epochs(rank: int) -> list[list[list[int]]]:
        source: Any = Shuffled()
        if kind == "loader":
            source = DataLoader(Numbers(8), batch_size=4, shuffle=True)
        torch.manual_seed(rank)
        random.seed(rank)
        loader = make_loader(source, fake_model(rank, 2), global_batch_size=4)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    first, second = (together(shares) for shares in zip(epochs(0), epochs(1), strict=True))
    assert sorted(joined(first)) == sorted(joined(second)) == list(range(8))
    assert first != second


class _Eight(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def _masks(samples: Any) -> Any:
    return torch.tensor([sample * random.random() for sample in samples])


@pytest.mark.parametrize("dataset", [list(range(8)), _Eight()])
def test_a_collate_function_that_draws_for_shares_is_told_once(dataset: Any, caplog: pytest.LogCaptureFixture) -> None:
    def read(collate: Any, size: int) -> list[str]:
        caplog.clear()
        for rank in range(size):
            loader = make_loader(dataset, fake_model(rank, size), global_batch_size=4, collate_fn=collate)
            for _ in range(2):
                list(itertools.islice(loader, 2))
        return [record.getMessage() for record in caplog.records if "collate_fn draws" in record.getMessage()]

    assert len(read(_masks, 2)) == 1
    assert read(_masks, 1) == []
    assert read(torch.tensor, 2) == []
