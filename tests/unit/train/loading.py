"""What the tests of loaders share: a stand-in for a model, data whose samples are their own numbers, and shares of ranks."""

import itertools
import types

import torch
from torch.utils.data import Dataset

from meshwright.describe.batches import BatchSplitter
from meshwright.spec import Plan
from meshwright.train.data.loader import make_loader


def fake_model(rank=0, size=1, plan=None, group=None):
    """What a loader needs of a ParallelModel."""
    return types.SimpleNamespace(
        plan=Plan.parse(plan or f"dp={size}"),
        dp_rank=rank,
        dp_size=size,
        splitter=BatchSplitter(),
        world=types.SimpleNamespace(default_group=group, device=torch.device("cpu")),
    )


class Numbers(Dataset):
    """Sample i is the number i."""

    deterministic_samples = True

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


def batches(length, size, *, dataset=None, **kwargs):
    """The lists of numbers that each rank gets, [rank][batch]."""
    loaders = [make_loader(dataset or Numbers(length), fake_model(rank, size), **kwargs) for rank in range(size)]
    return [[[] if batch is None else batch.tolist() for batch in loader] for loader in loaders]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def together(per_rank):
    """The global batches: the ranks' shares side by side."""
    assert len({len(rank) for rank in per_rank}) == 1
    return [joined(shares) for shares in zip(*per_rank, strict=True)]
