"""Code of a script that takes gradients inside of a step, hooks parameters in a forward, or leaves zeros in `.grad`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity.jobs.own_loop_jobs import Plain, Sgd
from torch import Tensor, nn

import meshwright as mw

STEPS = 4


class Net(nn.Module):
    """Two products; it may double the gradient of the first by a hook, registered at each forward or once."""

    def __init__(self, hooks: str = "none") -> None:
        super().__init__()
        self.up, self.down, self.hooks = nn.Linear(5, 8), nn.Linear(8, 3), hooks
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks == "each" and self.handle is not None:
            self.handle.remove()
        if self.hooks == "each" or (self.hooks == "once" and self.handle is None):
            self.handle = self.up.weight.register_hook(lambda gradient: 2 * gradient)
        return self.down(torch.tanh(self.up(x)))


def build(hooks: str = "none") -> nn.Module:
    return Net(hooks).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(7, 5, generator=made).double(), torch.randn(7, 3, generator=made).double()


def square(outputs: Tensor, given: Any) -> Tensor:
    return F.mse_loss(outputs, given[1])


def slope_of_each(outputs: Tensor, given: Any) -> Tensor:
    """Add a penalty on each sample's own gradient: a mean over samples."""
    (slope,) = torch.autograd.grad(outputs.pow(3).sum(), outputs, create_graph=True)
    return square(outputs, given) + 0.1 * slope.square().mean()


def slope_of_all(outputs: Tensor, given: Any) -> Tensor:
    """Divide by the norm of the batch's gradient: no mean over samples."""
    loss = square(outputs, given)
    (slope,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    return loss / (1 + slope.norm().detach())


def with_backward(outputs: Tensor, given: Any) -> Tensor:
    (0.1 * outputs.square().mean()).backward(retain_graph=True)
    return square(outputs, given)


LOSSES = {"each": slope_of_each, "all": slope_of_all, "backward": with_backward, "square": square}


def steps(plan: str, loss: str, hooks: str) -> dict[str, Any]:
    """Train by `model.step`; return the losses and the state."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with mw.apply_plan(functools.partial(build, hooks), plan, loss_fn=LOSSES[loss], optimizer=sgd) as model:
        losses = [model.step(mw.split_batch(batch(step), model)).loss for step in range(STEPS)]
        return {"losses": losses, "state": model.full_state_dict()}


def plain_steps(loss: str, hooks: str) -> dict[str, Any]:
    """Do the same on one plain process."""
    model = Plain(functools.partial(build, hooks), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    losses: list[float] = []
    for step in range(STEPS):
        model.zero_grad()
        losses.append(model.backward(LOSSES[loss](model(batch(step)[0]), batch(step))))
        model.optimizer.step()
    return {"losses": losses, "state": model.full_state_dict()}


def frozen_with_zeros(model: Any, share: Any, zero_grad: Any) -> dict[str, Tensor]:
    """Freeze a layer midway, and zero gradients in place: momentum still moves it."""
    for step in range(STEPS):
        if step == STEPS // 2:
            model.module.up.requires_grad_(False)
        zero_grad(set_to_none=False)
        x, y = share(batch(step))
        model.backward(F.mse_loss(model(x), y), weight=len(x))
        model.optimizer.step()
    return {name: value.clone() for name, value in model.full_state_dict().items()}


def frozen_plain() -> dict[str, Tensor]:
    model = Plain(build)
    return frozen_with_zeros(model, lambda given: given, model.optimizer.zero_grad)


def frozen_under(plan: str, by_model: bool) -> dict[str, Tensor]:
    with mw.apply_plan(build, plan, optimizer=Sgd) as model:
        assert model.optimizer is not None
        zero_grad = model.zero_grad if by_model else model.optimizer.zero_grad
        return frozen_with_zeros(model, lambda given: mw.split_batch(given, model), zero_grad)


def written(model: Any, share: Any, change: str, times: int) -> dict[str, Tensor]:
    """Change gradients between backward and the optimizer's step, and perhaps add those of further backwards after."""
    rank = mw.current_world().rank if change == "own" else 0
    for step in range(2):
        model.optimizer.zero_grad()
        for part in range(times):
            x, y = share(batch(10 * step + part))
            model.backward(F.mse_loss(model(x), y), weight=len(x))
            held = [p for group in model.optimizer.param_groups for p in group["params"] if p.grad is not None]
            for parameter in held if part == 0 else ():
                if change == "clamp":
                    parameter.grad.clamp_(-0.05, 0.05)
                else:
                    parameter.grad.mul_(1.0 + 0.5 * rank if change == "own" else 0.3)
        model.optimizer.step()
    return {name: value.clone() for name, value in model.full_state_dict().items()}


def written_plain(change: str, times: int) -> dict[str, Tensor]:
    return written(Plain(build), lambda given: given, change, times)


def written_under(plan: str, change: str, times: int) -> dict[str, Tensor]:
    with mw.apply_plan(build, plan, optimizer=Sgd) as model:
        return written(model, lambda given: mw.split_batch(given, model), change, times)


def clip_in_other_ways(plan: str, limits: tuple[tuple[float, ...], ...]) -> float:
    """Clip to the limits of this rank, one after the other; return a weight after two steps."""
    mine = limits[mw.join_world().rank]
    with mw.apply_plan(build, plan, optimizer=functools.partial(torch.optim.AdamW, lr=0.1)) as model:
        for step in range(2):
            inputs, targets = mw.split_batch(batch(step), model)
            model.backward(F.mse_loss(model(inputs), targets), weight=len(inputs))
            for limit in mine:
                model.clip_grad_norm(limit)
            model.optimizer.step()
            model.zero_grad()
        return float(next(iter(model.full_state_dict().values())).flatten()[0])


def done_by_one_rank(plan: str, what: str, *, by_all: bool) -> list[float]:
    """Do something to the gradient, the mode or the loss in the second of four steps, on rank 1 or on all; return losses."""
    with mw.apply_plan(build, plan, loss_fn=square, optimizer=functools.partial(torch.optim.AdamW, lr=0.1)) as model:
        losses: list[float] = []
        for step in range(4):
            does = step == 1 and (by_all or mw.join_world().rank == 1)
            given = mw.split_batch(batch(step), model)
            if does and what in ("eval", "eval of a step"):
                model.module.eval()
            if what == "eval of a step":
                losses.append(model.step(given).loss)
                continue
            loss: Any = F.mse_loss(model(given[0]), given[1])
            weight: Any = len(given[0])
            if does and what in LOSSES_OF_OTHER_KINDS:
                loss, weight = LOSSES_OF_OTHER_KINDS[what](loss, weight)
            losses.append(model.backward(loss, weight=weight))
            if does and what == "zeroed before the step":
                model.optimizer.zero_grad()
            if does and what == "one gradient set to None":
                next(model.module.parameters()).grad = None
            if does and what == "one gradient deleted":
                del next(model.module.parameters()).grad
            if does and what == "one set to None, then another backward":
                next(model.module.parameters()).grad = None
            if does and what in ZEROES:
                ZEROES[what](model)(set_to_none=False)
            if "then another backward" in what:
                model.backward(F.mse_loss(model(given[0]), given[1]), weight=weight)
            model.optimizer.step()
            if not (does and what == "not zeroed"):
                model.zero_grad()
        return losses


def saved_in_a_window(plan: str, folder: str) -> list[int]:
    """Save after each of two backwards, and after the optimizer's step; return how many warnings there were by then."""
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("meshwright")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    found: list[int] = []
    with mw.apply_plan(build, plan, optimizer=Sgd) as model:
        assert model.optimizer is not None
        for step, act in enumerate(("backward", "backward", "step", "nothing")):
            inputs, targets = mw.split_batch(batch(step), model)
            if act == "backward":
                model.backward(F.mse_loss(model(inputs), targets), weight=len(inputs))
            if act == "step":
                model.optimizer.step()
            mw.save_checkpoint(model, folder, step=step)
            found.append(sum("begins this accumulation anew" in text for text in told))
    logger.removeHandler(handler)
    return found


def scaled_by_torch(plan: str) -> float:
    """Scale and unscale the gradient by torch's GradScaler; return a weight after one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mw.apply_plan(build, plan, optimizer=Sgd) as model:
        inputs, targets = mw.split_batch(batch(0), model)
        model.backward(scaler.scale(F.mse_loss(model(inputs), targets)), weight=len(inputs))
        scaler.unscale_(model.optimizer)
        scaler.step(model.optimizer)
        return float(next(iter(model.full_state_dict().values())).flatten()[0])


LOSSES_OF_OTHER_KINDS: dict[str, Any] = {
    "a complex number": lambda loss, weight: (torch.complex(loss, loss), weight),
    "a dict": lambda loss, weight: ({"loss": loss}, weight),
    "a pair": lambda loss, weight: ((loss, loss), weight),
    "a list as weight": lambda loss, weight: (loss, [weight]),
    "a text as weight": lambda loss, weight: (loss, str(weight)),
    "two weights": lambda loss, weight: (mw.Loss(loss * weight, weight), weight),
}

ZEROES: dict[str, Any] = {
    "zeroed in place, then another backward": lambda model: model.optimizer.zero_grad,
    "zeroed by the model, then another backward": lambda model: model.zero_grad,
}
