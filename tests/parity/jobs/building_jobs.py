"""Models that are built in pages of a file, and beside them the same ones built in memory; ranks import this."""

from __future__ import annotations

import contextlib
import functools
import gc
import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tests.parity.jobs import checkpoint_jobs
from tests.parity.jobs.textbook_loop import losses_of
from torch import nn

import meshwright as mw
from meshwright.run.building import paged_build
from meshwright.run.building.pages import Pages


def in_pages(large: int) -> Any:
    """Return a context in which tensors of so many bytes and more are built in pages."""
    return mock.patch.multiple(paged_build, PLAIN_BYTES=0, LARGE_BYTES=large)


def compare(plan: str, kind: str, optimizer: str, pretrained: str | None = None) -> dict[str, Any]:
    """Return what differs between a model that is built in pages and one that is not, before and after three steps."""
    used: list[int] = []
    allocate = Pages.allocate

    def noting(pages: Pages, num_bytes: int) -> torch.UntypedStorage:
        used.append(large)
        return allocate(pages, num_bytes)

    results = []
    for large in (1, 2**40):
        with in_pages(large), mock.patch.object(Pages, "allocate", noting):
            model = mw.apply_plan(
                functools.partial(checkpoint_jobs.build, kind),
                plan,
                loss_fn=checkpoint_jobs.loss_fn,
                optimizer=checkpoint_jobs.OPTIMIZERS[optimizer],
                pretrained=pretrained,
            )
            with model:
                begin = model.full_state_dict()
                shares = [mw.split_batch(checkpoint_jobs.batch(kind, number), model) for number in range(3)]
                losses = [model.step(share).loss for share in shares]
                results.append((begin, losses, model.full_state_dict()))
    (begin, losses, end), (plain_begin, plain_losses, plain_end) = results
    return {
        "used": set(used),
        "begin": different(begin, plain_begin),
        "end": different(end, plain_end),
        "losses": [losses, plain_losses],
        "state": begin,
    }


def different(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert mine.keys() == other.keys()
    return [name for name, value in mine.items() if not torch.equal(value, other[name])]


def plain_state(kind: str) -> dict[str, torch.Tensor]:
    """Return the state of the model that one process builds."""
    torch.manual_seed(0)
    module: nn.Module = checkpoint_jobs.build(kind)
    return module.state_dict()


def graphs_left(plan: str) -> int:
    """Return how many tensors with a graph are there that were not before a plan looked at its first batch [count]."""
    before = _with_graphs()
    with checkpoint_jobs.apply(plan, "words", "sgd", is_prepared=True):
        return sum(all(item is not other for other in before) for item in _with_graphs())


def _with_graphs() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is torch.Tensor and item.grad_fn is not None]


def left_to_the_collector(plan: str) -> int:
    """Return the bytes of the tensors that each step leaves to the collector of cycles: the least of three steps.

    One step of some hundred has left 432 bytes on one rank, which did not come again: what adds up is in every step.
    """
    with checkpoint_jobs.apply(plan, "words", "sgd") as model:
        shares = [mw.split_batch(checkpoint_jobs.batch("words", number), model) for number in range(5)]
        for share in shares[:2]:
            model.step(share)
        left: list[int] = []
        for share in shares[2:]:
            gc.collect()
            with _collected() as found:
                model.step(share)
            left.append(sum(item.nbytes for item in found if type(item) in (torch.Tensor, nn.Parameter)))
        return min(left)


@contextlib.contextmanager
def _collected() -> Iterator[list[Any]]:
    """Have what the collector finds in cycles put into a list, from what runs inside."""
    found: list[Any] = []
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def stages(plan: str, kind: str) -> dict[str, int]:
    """Return the stage of each layer as the runtime cuts a model at its first batch."""
    with checkpoint_jobs.apply(plan, kind, "sgd", is_prepared=True) as model:
        return dict(model.plan.stages)


class Keyed(nn.Module):
    """A layer that keeps what it has computed under a key that no other layer, and no other process, has."""

    def __init__(self) -> None:
        super().__init__()
        self.key = str(uuid.uuid4())
        self.file = f"{uuid.uuid4().hex}.state"
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {f"{self.key}.hidden": self.up(x).relu()}
        return x + self.down(found[f"{self.key}.hidden"])


def build_keyed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Keyed() for _ in range(3))).double()


def keyed_losses(plan: str | None) -> list[float]:
    """Return the losses of two steps of layers with keys, in a plain loop where there is no plan."""
    batches = [
        tuple(torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n))) for n in (0, 1)
    ]
    if plan is None:
        return losses_of(build_keyed(), batches, mean_square)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(build_keyed, plan, loss_fn=mean_square, optimizer=optimizer) as model:
        return [model.step(mw.split_batch((x, y), model)).loss for x, y in batches]


def mean_square(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()
