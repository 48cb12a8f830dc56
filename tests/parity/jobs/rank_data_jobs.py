"""Training in which what a rank does depends on its own data, or on code that it alone has; ranks import them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import Sgd, batches, build_net, plain, planned, square
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw


class Loops(nn.Module):
    """Runs a layer as often as the inputs say, and others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        many = bool((x[:, 0] > 50).any())
        for layer in [*self.layers, *(list(self.layers) if many else [])]:
            h = h + torch.tanh(layer(h))
        return self.out(h)


def build_loops() -> nn.Module:
    return Loops().double()


def loop_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The last samples of the third batch, which are rank 1's, have large inputs; each sample is for itself."""
    for step, (inputs, targets) in enumerate(batches(4, 8)):
        inputs[:, 0] = 0.0
        if step >= 2:
            inputs[4:, 0] = 100.0
        yield inputs, targets


def looped(plan: str) -> list[float]:
    with mw.apply_plan(build_loops, plan, loss_fn=square, optimizer=Sgd) as model:
        # Memory in plenty would hide it: nothing is let go of in the first step.
        return [model.step(mw.split_batch(batch, model)).loss for batch in loop_batches()]


def plain_loops() -> list[float]:
    torch.manual_seed(0)
    module = build_loops()
    return losses_of(module, loop_batches(), square, optimizer=Sgd(module.parameters()), num_parts=2)


class Cached(nn.Module):
    """Keeps a buffer as long as its rank's own batch."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)
        self.register_buffer("cache", torch.zeros(1, dtype=torch.float64), persistent=persistent)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.arange(len(x), dtype=torch.float64)
        return self.norm(self.lin(x)) + 0.0 * self.cache[:, None]


def build_cached(persistent: bool) -> nn.Module:
    return Cached(persistent).double()


def cached(plan: str, persistent: bool) -> Tensor:
    build = functools.partial(build_cached, persistent)
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=Sgd) as model:
        for batch in batches(3):
            model.step(mw.split_batch(batch, model))
        return model.module.norm.running_mean.clone()


def hook_on_one_rank(plan: str) -> list[float]:
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        seen: list[int] = []
        if mw.current_world().rank == 0:
            model.module.out.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
        losses = [model.step(mw.split_batch(batch, model)).loss for batch in batches()]
        assert len(seen) == (3 if mw.current_world().rank == 0 else 0)
        return losses


def _take(parameter: Tensor) -> None:
    parameter.grad = None


def taken_on_one_rank(plan: str) -> None:
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        if mw.current_world().rank == 1:
            model.module.out.bias.register_post_accumulate_grad_hook(_take)
        model.step(mw.split_batch(batches(1)[0], model))


def detached(outputs: Tensor, batch: Any) -> Tensor:
    return square(outputs.detach(), batch)


class Penalty:
    """A loss that reads the parameters of the model, as weight decay by hand does."""

    def __init__(self) -> None:
        self.module: Any = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.module.parameters()]).sum()
        return square(outputs, batch) + 0.01 * penalty


def penalised(plan: str | None) -> tuple[list[float], dict[str, Tensor]]:
    penalty = Penalty()

    def take(_: Any, module: nn.Module, __: Any, ___: int) -> None:
        penalty.module = module

    if plan is None:
        return plain(build_net, take, loss_fn=penalty)
    return planned(build_net, plan, take, loss_fn=penalty)


class PutAside(Penalty):
    """The same, with a list of parameters that was made once."""

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return square(outputs, batch) + 0.01 * torch.stack([p.square().sum() for p in self.module]).sum()


def put_aside(plan: str) -> None:
    penalty = PutAside()

    def take(_: Any, module: nn.Module, __: Any, step: int) -> None:
        if step == 0:
            penalty.module = list(module.parameters())

    planned(build_net, plan, take, loss_fn=penalty)


class Recasts(nn.Module):
    """Brings a layer to float32 whenever it runs, as some routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.router = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.router.to(torch.float32)
        return self.router(torch.tanh(self.inp(x)).float()).double()


def build_recasts() -> nn.Module:
    return Recasts().double()


def build_embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6, **options), nn.Linear(6, 4)).double()
