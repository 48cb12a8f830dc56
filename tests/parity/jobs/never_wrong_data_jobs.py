"""Training scripts that do something to the model between two steps, under a plan and in plain PyTorch; ranks import them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from tests.parity.jobs.textbook_loop import steps_of
from torch import Tensor, nn
from torch.optim import swa_utils

import meshwright as mw

Change = Callable[[Any, nn.Module, torch.optim.Optimizer, int], None]
"""(what apply_plan returned or None, the module, its optimizer, steps so far) -> nothing."""

Sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Three layers, some of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.mid = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        for layer in self.mid:
            h = h + torch.tanh(layer(h))
        return self.out(h)


def build_net() -> nn.Module:
    return Net().double()


def batches(num_steps: int = 3, num_samples: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(num_samples, 6, generator=generator, dtype=torch.float64),
            torch.randn(num_samples, 4, generator=generator, dtype=torch.float64),
        )
        for _ in range(num_steps)
    ]


def square(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def no_change(model: Any, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    del model, module, optimizer, step


def planned(
    build: Callable[[], nn.Module],
    plan: str,
    change: Change = no_change,
    optimizer: Any = Sgd,
    loss_fn: Any = square,
    num_steps: int = 3,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and values after training under a plan, with `change` called before each step."""
    with mw.apply_plan(build, plan, loss_fn=loss_fn, optimizer=optimizer) as model:
        losses = []
        for step, batch in enumerate(batches(num_steps)):
            change(model, model.module, model.optimizer, step)
            losses.append(model.step(mw.split_batch(batch, model)).loss)
        return losses, model.full_state_dict()


def plain(
    build: Callable[[], nn.Module],
    change: Change = no_change,
    optimizer: Any = Sgd,
    loss_fn: Any = square,
    num_steps: int = 3,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same of one plain process."""
    torch.manual_seed(0)
    module = build()
    made = optimizer(list(module.parameters()))
    losses, steps = [], steps_of(module, batches(num_steps), loss_fn, optimizer=made)
    for step in range(num_steps):
        change(None, module, made, step)
        losses.append(next(steps))
    return losses, {name: value.clone() for name, value in module.state_dict().items()}


# -- own loops -------------------------------------------------------------------------------------------------------


def own_loop(plan: str) -> None:
    """Step once, then go on by hand."""
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        share = mw.split_batch(batches(1)[0], model)
        model.step(share)
        square(model(share[0]), share).backward()
        model.optimizer.step()


def foreign_head(plan: str, own: bool) -> bool:
    """Train with a loss that has a parameter of its own."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return square(scale * outputs, batch)

    with mw.apply_plan(build_net, plan, loss_fn=loss_fn, optimizer=Sgd) as model:
        share = mw.split_batch(batches(1)[0], model)
        if own:
            model.backward(loss_fn(model(share[0]), share), weight=len(share[0]))
        else:
            model.step(share)
        return scale.grad is not None


def step_alone(plan: str) -> None:
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        model.step(mw.split_batch(batches(1)[0], model))
        model.optimizer.step(lambda: 0.0)


def accumulate(plan: str, of_module: bool) -> None:
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        mw.GradientAccumulation(model.module if of_module else model, model.optimizer, 2)


def after_closing(plan: str) -> bool:
    model = mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd)
    model.step(mw.split_batch(batches(1)[0], model))
    model.close()
    before = model.module.out.weight.detach().clone()
    square(model.module(batches(1)[0][0]), batches(1)[0]).backward()
    model.optimizer.step()
    return not torch.equal(before, model.module.out.weight)


class Scheduled:
    """A learning rate scheduler of torch, stepped before each step but the first."""

    def __init__(self) -> None:
        self.scheduler: Any = None

    def __call__(self, model: Any, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        del model, module
        if step:
            self.scheduler.step()
        else:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


# -- optimizers ------------------------------------------------------------------------------------------------------


class GlobalNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, as LAMB's first step does."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt()
        for parameter in held:
            parameter.sub_(0.1 * parameter.grad / norm)


class Hybrid(torch.optim.Optimizer):
    """Plain for groups without `whole`, by the norm of each matrix for the others, as Muon with Adam is."""

    def __init__(self, groups: Any, lr: float = 0.1, whole: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "whole": whole})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() if group["whole"] else 1.0))


def hybrid(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Hybrid(
        [
            {"params": [p for p in parameters if p.dim() < 2]},
            {"params": [p for p in parameters if p.dim() > 1], "whole": True},
        ]
    )


def head_alone(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Sgd(parameters[-2:])


# -- values between steps ----------------------------------------------------------------------------------------------


def add_group(_: Any, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.add_param_group({"params": list(module.parameters())[:-2], "lr": 0.02})


def assign_data(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.inp.weight.data = module.inp.weight.data * 0.5


def assign_vector(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(0.5 * vector, module.parameters())


def clamp(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.05, 0.05)


def load_state(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        module.load_state_dict(build_net().state_dict())


def load_state_inside(model: Any, module: nn.Module, optimizer: Any, step: int) -> None:
    if model is None:
        load_state(model, module, optimizer, step)
    else:
        with model.whole_parameters():
            load_state(model, module, optimizer, step)


def read_state(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.mid[0].state_dict()


def copy_it(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        copy.deepcopy(module)


def tie_later(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.mid[1].weight.data = module.mid[0].weight.data


def build_tied_by_data() -> nn.Module:
    model = Net().double()
    model.mid[1].weight.data = model.mid[0].weight.data
    return model


def build_with_a_parameter_among_the_buffers() -> nn.Module:
    model = Net().double()
    model.mid[0].register_buffer("second_name", model.mid[0].weight)
    return model


def average_early(plan: str) -> list[Tensor]:
    """Average from a copy on that was made before the first batch, inside of whole_parameters."""
    with mw.apply_plan(build_net, plan, loss_fn=square, optimizer=Sgd) as model:
        with model.whole_parameters():
            averaged = swa_utils.AveragedModel(model.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        for batch in batches():
            model.step(mw.split_batch(batch, model))
            with model.whole_parameters():
                averaged.update_parameters(model.module)
        return [parameter.detach() for parameter in averaged.parameters()]


def plain_average() -> list[Tensor]:
    torch.manual_seed(0)
    module = build_net()
    averaged = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in steps_of(module, batches(), square, optimizer=Sgd(module.parameters())):
        averaged.update_parameters(module)
    return [parameter.detach() for parameter in averaged.parameters()]


class Averaged:
    """An average of the model, as people keep for evaluation."""

    def __init__(self) -> None:
        self.average: Any = None

    def __call__(self, model: Any, module: nn.Module, optimizer: Any, step: int) -> None:
        del optimizer
        if model is None:
            self.update(module, step)
        else:
            with model.whole_parameters():
                self.update(module, step)

    def update(self, module: nn.Module, step: int) -> None:
        if step == 0:
            self.average = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        self.average.update_parameters(module)

    def outputs(self) -> Tensor:
        return self.average(batches(1)[0][0]).detach()


def average(plan: str) -> Tensor:
    averaged = Averaged()
    planned(build_net, plan, averaged)
    return averaged.outputs()


def replace(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.out = nn.Linear(16, 4).double()


def replace_in_list(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.mid[1] = nn.Linear(16, 16).double()


def swap(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        module.mid[0], module.mid[1] = module.mid[1], module.mid[0]


def delete(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        del module.mid[1]


def reload_optimizer(_: Any, __: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_whole_state(_: Any, __: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Load what another rank's pieces would have: momenta of another length."""
    if step == 1:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["momentum_buffer"] = entry["momentum_buffer"].new_zeros(3)
        optimizer.load_state_dict(state)
