"""What the tests of writes into parameters and of penalties run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import Sgd, batches, square
from tests.parity.jobs.textbook_loop import losses_of
from torch import Tensor, nn

import meshwright as mw


class Scale(nn.Module):
    """One entry, of which one rank alone has a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), Scale()).double()


def write_all(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(2.0)


def write_one(module: nn.Module) -> None:
    module[2].bias.add_(1.0)


def write_entry(module: nn.Module) -> None:
    module[0].weight[0, 0] = 3.0


def write_moved(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full(parameter.shape, 0.5, dtype=parameter.dtype)


def write_computed(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def write_cast(module: nn.Module) -> None:
    module[2].bias.data = module[2].bias.data.float().double()


def write_scale(module: nn.Module) -> None:
    module[3].scale.fill_(2.0)


def written(plan: str, write: Any, whole: bool, after: int) -> dict[str, Tensor]:
    """Return values after three steps, with parameters written over before the step of this index."""
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=Sgd) as model:
        for index, batch in enumerate(batches()):
            if index == after and whole:
                with model.whole_parameters(), torch.no_grad():
                    write(model.module)
            elif index == after:
                with torch.no_grad():
                    write(model.module)
            model.step(mw.split_batch(batch, model))
        return model.full_state_dict()


def written_before_sentinels(plan: str) -> dict[str, Tensor]:
    """Return values after three steps of AdamW with a sentinel in each; before each all parameters are halved."""
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=torch.optim.AdamW, sentinel_every=1) as model:
        for batch in batches():
            with model.whole_parameters(), torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.mul_(0.5)
            model.full_state_dict()
            model.step(mw.split_batch(batch, model))
        return model.full_state_dict()


class Writing(nn.Sequential):
    """Writes into its own parameters in each forward: a weight of norm 1, or a teacher that follows."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(6, 5).requires_grad_(False))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        first, teacher = self[0], self[3]
        with torch.no_grad():
            if self.kind == "norm":
                first.weight.div_(first.weight.norm())
            elif self.kind == "data":
                first.weight.data.div_(first.weight.data.norm())
            elif self.kind == "moved":
                teacher.weight.data = teacher.weight.data * 0.9 + first.weight.data * 0.1
            else:
                teacher.weight.lerp_(first.weight, 0.1)
        return self[2](torch.tanh(first(x)) + teacher(x))


def written_in_forward(plan: str, kind: str) -> None:
    with mw.apply_plan(lambda: Writing(kind).double(), plan, loss_fn=square, optimizer=Sgd) as model:
        for batch in batches():
            model.step(mw.split_batch(batch, model))


def plainly_written(write: Any, after: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = build()
    optimizer = Sgd(list(module.parameters()))
    losses_of(module, batches()[:after], square, optimizer=optimizer)
    with torch.no_grad():
        write(module)
    losses_of(module, batches()[after:], square, optimizer=optimizer)
    return module.state_dict()


class Penalized:
    """A loss with a penalty over the module's own parameters, or over some of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module: Any = None

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        weights = [parameter for parameter in self.module.parameters() if parameter.dim() > 1]
        if self.kind == "one":
            weights = weights[:1]
        if self.kind == "orthogonal":
            return square(outputs, batch) + 0.1 * sum((weight.t() @ weight).square().sum() for weight in weights)
        return square(outputs, batch) + 0.1 * sum(weight.square().sum() for weight in weights)


def penalized(plan: str | None, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, loss_fn, losses = build(), Penalized(kind), []
    loss_fn.module = module
    if plan is None:
        losses = losses_of(module, batches(), loss_fn, optimizer=Sgd(list(module.parameters())))
        return losses, module.state_dict()
    devices = ["cpu"] * mw.Plan.parse(plan).dp
    with mw.apply_plan(module, plan, loss_fn=loss_fn, optimizer=Sgd, devices=devices) as model:
        losses = [model.step(batch).loss for batch in batches()]
        return losses, model.full_state_dict()
