"""Scripts that read, write, average or freeze parameters between steps, in losses and in hooks; ranks import them."""

from __future__ import annotations

import collections
import contextlib
import io
from typing import Any

import torch
from tests.parity.jobs.never_wrong_data_jobs import build_net, planned, square
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Optimizer = torch.optim.Optimizer

# -- between steps: (what apply_plan returned or None, the module, its optimizer, steps so far) ------------------------


@torch.no_grad()
def norms(_: Any, module: nn.Module, __: Any, step: int) -> None:
    """Divide by the norm of all parameters."""
    if step:
        total = torch.stack([parameter.norm() for parameter in module.parameters()]).norm()
        for parameter in module.parameters():
            parameter.mul_(2 / total)


@torch.no_grad()
def row_norms(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        for parameter in module.parameters():
            parameter.div_(parameter.norm(dim=0, keepdim=True))


@torch.no_grad()
def rows(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        for parameter in module.parameters():
            parameter[3] = 0.5


def drawn(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        torch.manual_seed(step)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)


@torch.no_grad()
def first_written(_: Any, module: nn.Module, __: Any, step: int) -> None:
    """Write into the first layer alone: its values, some rows, random numbers."""
    weight, bias = list(module.parameters())[:2]
    if step:
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))
        weight[3] = 0.5
        torch.manual_seed(step)
        nn.init.normal_(bias)
        bias.add_(torch.rand(bias.shape, dtype=bias.dtype))


@torch.no_grad()
def first_scaled(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        next(module.parameters()).mul_(0.5)


@torch.no_grad()
def sums_of_gradients(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        total = sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)
        for parameter in module.parameters():
            parameter.mul_(1 / (1 + total))


@torch.no_grad()
def clipped(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step:
        total = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for parameter in module.parameters():
            parameter.mul_(1 / (1 + total))


def numbers(_: Any, module: nn.Module, __: Any, step: int) -> None:
    """Give values out of torch."""
    if step:
        for parameter in module.parameters():
            parameter.detach().numpy()


@torch.no_grad()
def scaled(_: Any, module: nn.Module, __: Any, step: int) -> None:
    """What treats each entry by itself."""
    if step:
        for parameter in module.parameters():
            parameter.mul_(0.9).clamp_(-0.2, 0.2)


def frozen_by_place(_: Any, module: nn.Module, __: Any, step: int) -> None:
    for place, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(place % 3 != step)


def forgotten(_: Any, module: nn.Module, optimizer: Any, step: int) -> None:
    if step:
        optimizer.zero_grad()
        module.zero_grad(set_to_none=step == 1)


class Average:
    """An average of the parameters by hand, made when `first` steps are over and put into the model before the last."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, model: Any, module: nn.Module, optimizer: Any, step: int) -> None:
        del model, optimizer
        if step == self.first:
            self.kept = [parameter.detach().clone() for parameter in module.parameters()]
        elif step > self.first:
            for mine, parameter in zip(self.kept, module.parameters(), strict=True):
                mine.mul_(0.5).add_(parameter, alpha=0.5)
            torch._foreach_lerp_(self.kept, list(module.parameters()), 0.25)
        if step == 2:
            for mine, parameter in zip(self.kept, module.parameters(), strict=True):
                parameter.copy_(mine)


class Averaged:
    """torch's AveragedModel, put into the model before the last step."""

    def __init__(self, first: int, *, inside: bool) -> None:
        self.first, self.inside = first, inside
        self.average: Any = None

    def __call__(self, model: Any, module: nn.Module, optimizer: Any, step: int) -> None:
        del optimizer
        with model.whole_parameters() if model is not None and self.inside else contextlib.nullcontext():
            if step == self.first:
                self.average = AveragedModel(module)
            if step > self.first:
                self.average.update_parameters(module)
            if step == 2:
                module.load_state_dict(self.average.module.state_dict())


class Inside:
    """Another change, where all values are whole."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def __call__(self, model: Any, module: nn.Module, optimizer: Any, step: int) -> None:
        with contextlib.nullcontext() if model is None else model.whole_parameters():
            self.change(model, module, optimizer, step)


# -- hooks -----------------------------------------------------------------------------------------------------------


def _unit(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def _halved(gradient: Tensor) -> Tensor:
    return (2 * gradient).mul_(0.25)


def _unit_of(parameter: Tensor) -> None:
    parameter.grad.div_(parameter.grad.norm())  # pyright: ignore[reportOptionalMemberAccess]


def _halve_of(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # pyright: ignore[reportOptionalMemberAccess]


def unit_hooks(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        for parameter in module.parameters():
            parameter.register_hook(_unit)


def linear_hooks(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        for parameter in module.parameters():
            parameter.register_hook(_halved)


def unit_hooks_after(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_unit_of)


def linear_hooks_after(_: Any, module: nn.Module, __: Any, step: int) -> None:
    if step == 1:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_halve_of)


def _clip(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


@torch.no_grad()
def _decay(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(1 - 0.1 * parameter.norm())


def clip_in_hook(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.register_step_pre_hook(_clip)


def decay_in_hook(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.register_step_post_hook(_decay)


# -- losses and code between layers ------------------------------------------------------------------------------------


class Penalty:
    """A loss that reads the parameters from the second step on, or where gradients are off."""

    def __init__(self) -> None:
        self.module: Any = None
        self.is_on = False

    def switch(self, _: Any, module: nn.Module, __: Any, step: int) -> None:
        self.module, self.is_on = module, step > 0

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = square(outputs, batch)
        if not self.is_on:
            return loss
        weight = self.module.inp.weight
        return loss + (weight.t() @ weight).square().sum()


class Glued(nn.Module):
    """Uses a weight of a layer beside that layer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.inp = nn.Linear(6, 16)
        self.mid = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)])
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        for layer in self.mid:
            h = h + layer(h)
        if self.is_on:
            h = h + (h @ self.mid[0][0].weight.t()).square().mean(-1, keepdim=True)
        return self.out(h)


def build_glued() -> nn.Module:
    return Glued().double()


def switch_glue(_: Any, module: nn.Module, __: Any, step: int) -> None:
    module.is_on = step > 0


def penalized(plan: str) -> Any:
    """Train under a plan with a penalty that comes later."""
    loss_fn = Penalty()
    return planned(build_net, plan, loss_fn.switch, loss_fn=loss_fn)


# -- the optimizer's state -------------------------------------------------------------------------------------------


def momenta_halved(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step:
        for entry in optimizer.state.values():
            entry["momentum_buffer"].mul_(0.5)


def momenta_reset(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.state.clear()
    elif step == 2:
        optimizer.state = collections.defaultdict(dict)


def momenta_of_groups(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if step):
        entry = optimizer.state[parameter]
        entry["momentum_buffer"] = entry["momentum_buffer"].clone() * 2


def momenta_saved(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Go back to the momenta of before, through a file of this rank's own."""
    if step:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        for entry in optimizer.state.values():
            entry["momentum_buffer"].zero_()
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))


def momenta_read(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step:
        total = sum(float(entry["momentum_buffer"].norm()) for entry in optimizer.state.values())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)


def momenta_read_of_dict(_: Any, __: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step:
        entries = optimizer.state_dict()["state"].values()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(float(e["momentum_buffer"].norm()) for e in entries))


def momenta_read_by_parameter(_: Any, module: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step:
        total = sum(float(optimizer.state[p]["momentum_buffer"].abs().max()) for p in module.parameters())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)


def momenta_of_elsewhere(_: Any, module: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Load the state that a plain process has saved."""
    if step:
        twin = torch.optim.SGD([torch.zeros_like(p) for p in build_net().parameters()], lr=0.1, momentum=0.9)
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        twin.step()
        optimizer.load_state_dict(twin.state_dict())
