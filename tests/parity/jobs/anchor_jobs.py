"""Functions that ranks import: faults of memory, and mutations of this library's own code, and what is said of them."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from tests.parity import losses
from tests.parity.jobs import sentinel_jobs
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.recompute import checkpointing
from meshwright.apply.shards.classes import as_plain
from meshwright.apply.tensor import cutting, region_state
from meshwright.apply.tensor.proof import threads
from meshwright.comm import functional

SGD = functools.partial(torch.optim.SGD, lr=0.1)


# -- memory that no other rank has a copy of ---------------------------------------------------------------------------


def flip(plan: str, what: str, every: int) -> dict[str, Any]:
    """Turn a bit of what only rank 1 holds before step `every`, at which a sentinel is due."""

    def before(number: int, model: mw.ParallelModel, share: Any) -> Any:
        if number == every and sentinel_jobs.rank() == 1:
            _flip(_held_alone(model, what))
        return share

    options: dict[str, Any] = {"optimizer": sentinel_jobs.ADAM, "loss_fn": losses.cross_entropy}
    with mw.apply_plan(sentinel_jobs.build_net, plan, sentinel_every=every, **options) as model:
        return sentinel_jobs.step_until_told(model, every + 3, before)


def _held_alone(model: mw.ParallelModel, what: str) -> Tensor:
    if what == "buffer":
        return model.module.get_buffer("scale")
    if model.optimizer is None:
        raise RuntimeError("no optimizer")
    held = [tensor for group in model.optimizer.param_groups for tensor in group["params"]]
    matrices = [tensor for tensor in held if tensor.numel() > 16 and 0 not in tensor.stride()]
    state: Any = model.optimizer.state[matrices[0]]
    return state["exp_avg_sq"] if what == "state" else matrices[0]


def _flip(tensor: Tensor) -> None:
    as_plain(tensor).data.view(-1).view(torch.int64)[1] ^= 1 << 48


def clamp_one(plan: str, entries: int) -> dict[str, Any]:
    """Write into `.data` of the head on every rank, before each step, as scripts do; a pipeline holds it on one rank."""

    def before(number: int, model: mw.ParallelModel, share: Any) -> Any:
        model.module.get_parameter("head.weight").data.view(-1)[:entries].mul_(0.5 + 0.1 * number)
        return share

    with mw.apply_plan(
        sentinel_jobs.build_net, plan, optimizer=SGD, loss_fn=losses.cross_entropy, sentinel_every=2
    ) as model:
        if 0 in model.module.get_parameter("head.weight").stride():
            raise RuntimeError("not before the model is cut")
        return sentinel_jobs.step_until_told(model, 5, _where_it_is(before))


def _where_it_is(before: Callable[..., Any]) -> Callable[..., Any]:
    def only(number: int, model: mw.ParallelModel, share: Any) -> Any:
        is_here = 0 not in model.module.get_parameter("head.weight").stride()
        return before(number, model, share) if is_here else share

    return only


# -- mutations ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.draws = nn.Linear(8, 8), nn.Dropout(0.3), draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.linear(x)))
        return x * (1 + random.random()) if self.draws else x


class Tower(nn.Module):
    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(draws=draws) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_tower(draws: bool) -> nn.Module:
    return Tower(draws=draws).double()


def _numbers(number: int) -> Any:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return x, torch.zeros(8, 8, dtype=torch.float64)


@contextlib.contextmanager
def another_mask() -> Iterator[None]:
    original = checkpointing._Twice.__call__

    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(int(self._before is not None))
        return original(self, *args, **kwargs)

    with mock.patch.object(checkpointing._Twice, "__call__", again):
        yield


def recomputed(plan: str, draws: bool, mutated: bool) -> dict[str, Any]:
    """Train a tower whose layers run again in backward."""
    with another_mask() if mutated else contextlib.nullcontext():
        model = mw.apply_plan(
            functools.partial(build_tower, draws),
            plan,
            optimizer=SGD,
            loss_fn=losses.square,
            sentinel_every=1,
            rng="torch"
            if mutated
            else "global",  # numbers by place are the same when a layer runs again, whatever its mask
        )
        with model:
            return sentinel_jobs.step_until_told(
                model, 4, lambda number, model, _: mw.split_batch(_numbers(number), model)
            )


@contextlib.contextmanager
def shards_swapped() -> Iterator[None]:
    original = cutting.take_shard

    def wrong(full: Tensor, layout: Any) -> Tensor:
        own = original(full, layout)
        return own.flip(0) if sentinel_jobs.rank() == 1 else own

    with mock.patch.object(cutting, "take_shard", wrong):
        yield


@contextlib.contextmanager
def row_not_summed() -> Iterator[None]:
    def forward(ctx: Any, tensor: Tensor, how: functional.How) -> Tensor:
        ctx.how = how
        total = tensor.clone()
        if isinstance(how[0], threads.ThreadGroup):
            how[0].all_reduce(total)
        return total

    with mock.patch.object(functional._Reduce, "forward", staticmethod(forward)):
        yield


@contextlib.contextmanager
def one_mask() -> Iterator[None]:
    original = region_state.Drawing.apart

    def apart(self: Any, device: torch.device) -> None:
        if isinstance(self._group, threads.ThreadGroup):
            original(self, device)

    with mock.patch.object(region_state.Drawing, "apart", apart):
        yield


@contextlib.contextmanager
def one_mask_everywhere() -> Iterator[None]:
    with mock.patch.object(region_state.Drawing, "apart", return_value=None):
        yield


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "shards_swapped": shards_swapped,
    "row_not_summed": row_not_summed,
    "one_mask": one_mask,
    "one_mask_everywhere": one_mask_everywhere,
    "nothing": contextlib.nullcontext,
}


def mutated(plan: str, name: str) -> dict[str, Any]:
    """Train with a mutation; return what was said, and the plan's reasons."""
    reasons: list[str] = []
    told: dict[str, Any]
    with MUTATIONS[name]():
        model = mw.apply_plan(
            functools.partial(sentinel_jobs.build_net, 0.3),
            plan,
            optimizer=SGD,
            loss_fn=losses.cross_entropy,
            sentinel_every=2,
            rng="torch",  # whose states are broken here; numbers by place come from none
        )
        with model:
            told = sentinel_jobs.step_until_told(model, 3, lambda number, model, share: share)
            reasons = list(model.plan.reasons) if told["steps"] else []
    return told | {"reasons": reasons}
