"""train/data/streams.py: streams and ready-made batches are shared out, resume, and end together."""

import threading
import types

import pytest
import torch
from tests.unit.train.loading import Numbers, batches, fake_model, together
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from meshwright.errors import ConfigError
from meshwright.train.data.loader import make_loader


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream_of_samples_is_shared_out(size):
    per_rank = batches(0, size, dataset=Stream(11), global_batch_size=4)
    assert together(per_rank) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("size", [1, 2])
def test_ready_made_batches_are_shared_out(size):
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=4)
    ranks = [list(make_loader(loader, fake_model(rank, size))) for rank in range(size)]
    first = torch.cat([batch[0][0] for batch in ranks if batch[0] is not None])
    last = torch.cat([batch[1][0] for batch in ranks if batch[1] is not None])
    assert (first.tolist(), last.tolist()) == ([0, 1, 2, 3], [4])


def test_ready_made_batches_of_another_size_than_was_asked_for_are_refused():
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    with pytest.raises(ConfigError, match=r"global_batch_size=6.*makes global batches of 4 samples") as error:
        make_loader(loader, fake_model(), global_batch_size=6)
    assert error.value.fix == "its dataset instead of the DataLoader, or global_batch_size=4"
    assert len(list(make_loader(loader, fake_model(), global_batch_size=4))) == 2
    assert len(list(make_loader(loader.dataset, fake_model(), global_batch_size=6))) == 2
    make_loader(loader, fake_model(), global_batch_size=6, rank_local=True)
    batch_sampler = [[0, 1, 2], [3, 4, 5, 6, 7]]
    mixed = DataLoader(loader.dataset, batch_sampler=batch_sampler)
    assert len(list(make_loader(mixed, fake_model(), global_batch_size=6))) == 2


def test_a_stream_resumes_and_refuses_an_indexed_position():
    loader = make_loader(Stream(10), fake_model(), global_batch_size=3)
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    other = make_loader(Stream(10), fake_model(), global_batch_size=3)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[3, 4, 5], [6, 7, 8], [9]]
    with pytest.raises(ConfigError, match="stream"):
        other.load_state_dict(make_loader(Numbers(3), fake_model()).state_dict())


def test_a_stream_goes_on_at_its_sample_under_another_batch_size():
    loader = make_loader(Stream(12), fake_model(), global_batch_size=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    iterator.close()
    other = make_loader(Stream(12), fake_model(), global_batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[8, 9], [10, 11]]
    inside = make_loader(Stream(12), fake_model(), global_batch_size=3)
    with pytest.raises(ConfigError, match="8 samples into its stream, which is inside of a batch of 3") as error:
        inside.load_state_dict(loader.state_dict())
    assert error.value.fix == "global_batch_size=4, as before"
    older = {"version": 1, "epoch": 0, "batch": 2}  # of a program that did not note the size
    other.load_state_dict(older)
    assert next(iter(other)).tolist() == [4, 5]


@pytest.mark.parametrize(
    "change",
    [{"batch": -1}, {"batch": 1.5}, {"epoch": "1"}, {"version": 2}, {"global_batch_size": True}, {"batch": None}],
)
def test_a_position_that_no_stream_gives_is_refused(change):
    loader = make_loader(Stream(10), fake_model(), global_batch_size=3)
    with pytest.raises(ConfigError, match=f"the loader's state has {next(iter(change))}"):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(ConfigError, match="no 'batch'"):
        loader.load_state_dict({"version": 1, "epoch": 0})
    with pytest.raises(ConfigError, match="is a list"):
        loader.load_state_dict([])


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(ConfigError, match="neither indexed"):
        make_loader(3, fake_model())
    with pytest.raises(ConfigError, match="num_workers=2 with ready-made batches"):
        make_loader(iter([1]), fake_model(), num_workers=2)


class ThreadGroup:
    """An all-reduce between threads."""

    def __init__(self, size):
        self.slots, self.barrier = [0] * size, threading.Barrier(size, timeout=20)

    def member(self, rank):
        def all_reduce(tensor, op):
            self.slots[rank] = int(tensor)
            self.barrier.wait()
            tensor.fill_((max if op == "max" else min)(self.slots))
            self.barrier.wait()

        return types.SimpleNamespace(all_reduce=all_reduce)


@pytest.mark.parametrize(("when_uneven", "expected"), [("continue", [5, 5]), ("stop", [3, 3])])
def test_ranks_with_unequal_streams_end_together(when_uneven, expected):
    # The bug: the rank with more data enters an exchange that nobody else joins.
    group, got = ThreadGroup(2), [None, None]

    def run(rank, length):
        source = [torch.tensor([rank, i]) for i in range(length)]
        model = fake_model(rank, 2, group=group.member(rank))
        got[rank] = list(make_loader(source, model, rank_local=True, when_uneven=when_uneven))

    threads = [threading.Thread(target=run, args=(rank, length)) for rank, length in enumerate([5, 3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(batches) for batches in got] == expected
    assert [batch is None for batch in got[1]] == [False] * 3 + [True] * (expected[1] - 3)
