"""train/data/loader.py, order.py, fetch.py: which sample goes where, and that nothing is left running."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from tests.unit.train.loading import Numbers, batches, fake_model, joined, together
from torch.utils.data import Dataset, Subset, TensorDataset

from meshwright.errors import ConfigError
from meshwright.train.data.fetch import draws_random_numbers, read_ahead
from meshwright.train.data.loader import make_loader
from meshwright.train.data.order import epoch_order, mix

# -- order and shares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_layout_makes_the_same_global_batches(size, drop_last):
    expected = together(batches(23, 1, global_batch_size=6, drop_last=drop_last))
    assert together(batches(23, size, global_batch_size=6, drop_last=drop_last)) == expected
    seen = joined(expected)
    assert len(seen) == len(set(seen)) == (18 if drop_last else 23)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_counts_each_sample_once_in_dataset_order(size):
    for batch_size in (1, 2, 3):
        per_rank = batches(7, size, global_batch_size=batch_size, shuffle=False)
        assert joined(together(per_rank)) == list(range(7))


def test_shares_differ_by_at_most_one_and_the_larger_come_first():
    per_rank = batches(11, 4, global_batch_size=11)
    assert [len(rank[0]) for rank in per_rank] == [3, 3, 3, 2]


def test_a_rank_without_samples_gets_none_and_the_same_number_of_batches():
    loaders = [make_loader(Numbers(9), fake_model(rank, 4), global_batch_size=3) for rank in range(4)]
    assert [len(loader) for loader in loaders] == [3, 3, 3, 3]
    assert [batch is None for batch in loaders[3]] == [True, True, True]
    assert [batch is None for batch in loaders[2]] == [False, False, False]
    single = [list(make_loader(Numbers(1), fake_model(rank, 4), global_batch_size=8)) for rank in range(4)]
    assert [len(got) for got in single] == [1, 1, 1, 1]
    assert [got[0] is None for got in single] == [False, True, True, True]


def test_default_global_batch_size_follows_the_plan():
    loader = make_loader(Numbers(1000), fake_model(0, 2, "dp=2,micro_batches=3"))
    assert loader.global_batch_size == 8 * 3 * 2
    loader = make_loader(Numbers(1000), fake_model(0, 2, "dp=2,micro_batches=3,micro_batch_size=5"))
    assert loader.global_batch_size == 30
    # One process that spreads its batch over threads gets all of it.
    loader = make_loader(Numbers(1000), fake_model(0, 1, "data_parallel,dp=4"))
    assert loader.global_batch_size == len(next(iter(loader))) == 32


def test_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = epoch_order(50, 0, 0, shuffle=True).tolist()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert epoch_order(50, 0, 0, shuffle=True).tolist() == first
    assert torch.equal(torch.get_rng_state(), state)
    orders = {tuple(epoch_order(50, seed, epoch, shuffle=True).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9  # seed 0 in epoch 1 is not seed 1 in epoch 0
    assert sorted(first) == list(range(50))


def test_mixed_seeds_do_not_collide():
    seeds = {mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_each_iteration_is_the_next_epoch_also_after_a_break():
    loader = make_loader(Numbers(10), fake_model(), global_batch_size=4)
    first = [batch.tolist() for batch in loader]
    for batch in loader:
        assert batch.tolist() != first[0]
        break
    third = [batch.tolist() for batch in loader]
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first
    assert third != first


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"when_uneven": "pad"}, "when_uneven='pad'"),
        ({"global_batch_size": 11, "drop_last": True}, "10 samples gives no batch of 11"),
    ],
)
def test_bad_arguments_are_refused(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make_loader(Numbers(10), fake_model(), **kwargs)
    with pytest.raises(ConfigError, match="0 samples"):
        make_loader(Numbers(0), fake_model())


# -- position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("stop_after", [0, 1, 3, 5, 7])
def test_position_resumes_under_another_number_of_ranks(stop_after, prefetch):
    def numbers(loader, count):
        got = []
        while len(got) < count:
            for batch in loader:
                got.append([] if batch is None else batch.tolist())
                if len(got) == count:
                    break
        return got

    whole = numbers(make_loader(Numbers(17), fake_model(), global_batch_size=4), 12)  # 5 batches an epoch
    before = [make_loader(Numbers(17), fake_model(r, 2), global_batch_size=4, prefetch=prefetch) for r in range(2)]
    head = together([numbers(loader, stop_after) for loader in before])
    after = [make_loader(Numbers(17), fake_model(r, 3), seed=99, global_batch_size=4) for r in range(3)]
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1]  # what was read ahead is not counted
    for loader in after:
        loader.load_state_dict(dict(states[0]))
    tail = together([numbers(loader, 12 - stop_after) for loader in after])
    assert head + tail == whole


def test_position_resumes_under_another_batch_size():
    loader = make_loader(Numbers(12), fake_model(), global_batch_size=4)
    iterator = iter(loader)
    head = next(iterator).tolist() + next(iterator).tolist()
    iterator.close()
    other = make_loader(Numbers(12), fake_model(), global_batch_size=3)
    other.load_state_dict(loader.state_dict())
    tail = joined(batch.tolist() for batch in other)
    assert head + tail == epoch_order(12, 0, 0, shuffle=True).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"samples": -1}, {"samples": 13}, {"samples": 1.5}, {"epoch": -1}, {"epoch": True}, {"seed": "0"}, {"seed": None},
        {"shuffle": 1}, {"dataset_length": "12"}, {"version": None},
    ],
)  # fmt: skip
def test_a_position_that_no_loader_gives_is_refused(change):
    loader = make_loader(Numbers(12), fake_model())
    with pytest.raises(ConfigError, match=f"the loader's state has {next(iter(change))}"):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(ConfigError, match="no 'samples'"):
        loader.load_state_dict({name: value for name, value in loader.state_dict().items() if name != "samples"})
    assert len(list(loader)) == 2


def test_position_of_other_data_is_refused():
    state = make_loader(Numbers(12), fake_model()).state_dict()
    with pytest.raises(ConfigError, match="12 samples, this one has 13"):
        make_loader(Numbers(13), fake_model()).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle=True"):
        make_loader(Numbers(12), fake_model(), shuffle=False).load_state_dict(state)
    with pytest.raises(ConfigError, match="version"):
        make_loader(Numbers(12), fake_model()).load_state_dict(state | {"version": 9})


# -- random numbers ---------------------------------------------------------------------------------------------------


class Draws(Dataset):
    """Sample i is one draw from each generator, as augmentations make them."""

    def __init__(self, length=8):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def draws(*, rank=0, size=1, seed=0, epoch=0, num_workers=0):
    loader = make_loader(Draws(), fake_model(rank, size), seed=seed, global_batch_size=4, num_workers=num_workers)
    loader.set_epoch(epoch)
    return torch.cat([batch for batch in loader if batch is not None])


def test_augmentations_depend_on_seed_epoch_and_sample_only():
    # Two ranks with two workers each would all draw the same numbers if they were seeded by the worker's id.
    alone = draws()
    assert torch.unique(alone).numel() == alone.numel() == 24
    halves = [draws(rank=rank, size=2, num_workers=2) for rank in range(2)]
    side_by_side = torch.cat([halves[0][:2], halves[1][:2], halves[0][2:], halves[1][2:]])
    assert torch.equal(side_by_side, alone)
    assert torch.equal(draws(), alone)
    for other in (draws(seed=1), draws(epoch=1)):
        assert not set(other.flatten().tolist()) & set(alone.flatten().tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_models_random_numbers_are_left_alone(num_workers):
    def model_draws(*, with_loader):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        loader = make_loader(Draws(), fake_model(), global_batch_size=4, num_workers=num_workers)
        for _ in loader if with_loader else range(2):
            torch.rand(3)
        return torch.rand(()).item(), np.random.rand(), random.random()

    assert model_draws(with_loader=True) == model_draws(with_loader=False)


def test_datasets_that_draw_nothing_are_known():
    assert draws_random_numbers(Draws())
    assert draws_random_numbers(Subset(Draws(), [0]))
    assert not draws_random_numbers(Numbers(3))
    assert not draws_random_numbers(Subset(TensorDataset(torch.zeros(3)), [0]))


# -- reading ahead ----------------------------------------------------------------------------------------------------


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("no such picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("kwargs", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 1}])
def test_an_exception_of_the_dataset_names_the_index(kwargs):
    iterator = iter(make_loader(Broken(8), fake_model(), global_batch_size=2, shuffle=False, **kwargs))
    assert next(iterator).tolist() == [0, 1]
    assert next(iterator).tolist() == [2, 3]
    with pytest.raises(LookupError) as caught:
        next(iterator)
    assert "dataset[5]" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


class Stops(Numbers):
    def __getitem__(self, index):
        return next(iter([])) if index == 5 else super().__getitem__(index)


def stops(samples):
    return next(iter([])) if samples[0] == 4 else torch.stack(samples)


@pytest.mark.parametrize("kwargs", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 1}])
@pytest.mark.parametrize("how", ["dataset", "collate"])
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch(kwargs, how):
    given = {"collate_fn": stops} if how == "collate" else {}
    data = Stops(8) if how == "dataset" else Numbers(8)
    iterator = iter(make_loader(data, fake_model(), global_batch_size=2, shuffle=False, **kwargs, **given))
    assert [len(next(iterator)), len(next(iterator))] == [2, 2]
    with pytest.raises(RuntimeError, match="raised StopIteration while a batch was read"):
        next(iterator)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "meshwright-prefetch"]


@pytest.mark.parametrize("end", ["close", "drop", "exhaust"])
def test_the_thread_ends_with_its_iterator(end):
    iterator = iter(make_loader(Numbers(100), fake_model(), global_batch_size=2))
    next(iterator)
    assert len(prefetch_threads()) == 1
    if end == "close":
        iterator.close()
    elif end == "drop":
        del iterator
        gc.collect()
    else:
        list(iterator)
    assert prefetch_threads() == []


def test_reading_ahead_goes_so_far_and_no_further():
    produced, room = [], threading.Semaphore(0)

    def source():
        for number in range(100):
            produced.append(number)
            room.release()
            yield number

    ahead = read_ahead(source(), 3)
    assert next(ahead) == 0
    for _ in range(4):  # number 0 and the three that are ahead of it
        assert room.acquire(timeout=10)
    ahead.close()
    assert len(produced) <= 5
    assert prefetch_threads() == []


def test_default_collate_makes_batches_of_pairs():
    dataset = TensorDataset(torch.arange(6.0), torch.arange(6))
    inputs, targets = next(iter(make_loader(dataset, fake_model(), global_batch_size=3, shuffle=False)))
    assert inputs.tolist() == [0.0, 1.0, 2.0]
    assert targets.tolist() == [0, 1, 2]
    batch = next(iter(make_loader(dataset, fake_model(), shuffle=False, global_batch_size=2, collate_fn=list)))
    assert isinstance(batch, list)


def test_a_batch_larger_than_the_dataset_is_told_once(caplog):
    for rank in range(2):
        make_loader(Numbers(8), fake_model(rank, 2), global_batch_size=8)
    assert not caplog.records
    for rank in range(2):
        make_loader(Numbers(8), fake_model(rank, 2), global_batch_size=9)
    assert [record.getMessage() for record in caplog.records] == [
        "make_loader: global_batch_size=9 of a dataset of 8 samples: every step has 8. Fix: global_batch_size=8"
    ]
