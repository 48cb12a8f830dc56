"""Functions that ranks import: training in which the script does something on one rank alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

import meshwright as mw

FAULTY, FAULTY_STEP, STEPS = 1, 2, 5
ADAM = functools.partial(torch.optim.AdamW, lr=0.05)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks; `last` is a note of the share that a forward makes, and `scale` a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = 1.0, 0.0
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale * factor


class Noting(Net):
    """Notes a number of each share, as a loop's log reads it."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        outputs = super().forward(x, factor)
        self.last = float(outputs.detach().sum())
        return outputs


def build(kind: type[Net] = Net) -> nn.Module:
    return kind().double()


def batch(step: int) -> tuple[dict[str, Any], Tensor]:
    made = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=made, dtype=torch.float32).double(), "factor": 1.0}, torch.randint(
        3, (8,), generator=made
    )


def _loss(outputs: Tensor, given: Any) -> Tensor:
    return F.cross_entropy(outputs, given[1])


def _options(model: mw.ParallelModel, **options: Any) -> None:
    for group in [] if model.optimizer is None else model.optimizer.param_groups:
        group.update(options)


def _state(model: mw.ParallelModel) -> dict[Any, dict[str, Any]]:
    return {} if model.optimizer is None else model.optimizer.state


def _setting(name: str, key: str, value: Any) -> Callable[[mw.ParallelModel], Any]:
    return lambda model: setattr(model.module.get_submodule(name), key, value)


_removed_at_the_end: list[RemovableHandle] = []


def _hook_all(_: mw.ParallelModel) -> None:
    _removed_at_the_end.append(
        register_module_forward_hook(lambda kind, _, out: 2 * out if isinstance(kind, Net) else None)
    )


ACTS: dict[str, Callable[[mw.ParallelModel], Any]] = {
    "weight_decay": lambda model: _options(model, weight_decay=0.7),
    "betas": lambda model: _options(model, betas=(0.5, 0.6)),
    "maximize": lambda model: _options(model, maximize=True),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
    "no gradients": lambda _: torch.set_grad_enabled(False),
    "mode": lambda model: model.module.get_submodule("blocks.1.drop").eval(),
    "rate": _setting("blocks.0.drop", "p", 0.7),
    "epsilon": _setting("blocks.1.norm", "eps", 0.5),
    "data": lambda model: model.module.get_parameter("head.bias").data.add_(1.0),
    "moments": lambda model: [state["exp_avg"].zero_() for state in _state(model).values()],
    "new moments": lambda model: [
        state.update(exp_avg=state["exp_avg"] * 0.5) for state in _state(model).values() if state
    ],
    "moments by rank": lambda model: [
        state["exp_avg"].mul_(0.5 + 0.1 * model.world.rank) for state in _state(model).values()
    ],
    "first moment": lambda model: next(iter(_state(model).values()))["exp_avg"].zero_(),
    "cleared": lambda model: _state(model).clear(),
    "scale": _setting("", "scale", 3.0),
    "hook": lambda model: model.module.get_parameter("head.weight").register_hook(lambda gradient: 2 * gradient),
    "layer hook": lambda model: model.module.get_submodule("blocks.1").register_forward_hook(lambda *a: 2 * a[2]),
    "frozen": lambda model: model.module.get_parameter("head.bias").requires_grad_(False),
    "frozen apart": lambda model: model.module.get_parameter(f"blocks.{model.world.rank}.up.bias").requires_grad_(
        False
    ),
    "hook of all": _hook_all,
    "forward": lambda model: model(**mw.split_batch(batch(0), model)[0]),
    "nothing": lambda model: None,
}


def _told(run: Callable[[], list[float]]) -> dict[str, Any]:
    try:
        return {"kind": None, "losses": run(), "text": ""}
    except mw.MeshwrightError as error:
        return {"kind": type(error).__name__, "text": str(error)}


def train(
    plan: str, act: str, kind: type[Net] = Net, everywhere: bool = False, faulty_step: int = FAULTY_STEP
) -> dict[str, Any]:
    """Train by `model.step`; one rank does something before a step. Findings of all steps and warnings are returned, too."""
    findings: list[str] = []
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())

    def run() -> list[float]:
        losses = []
        with mw.apply_plan(functools.partial(build, kind), plan, loss_fn=_loss, optimizer=ADAM, seed=3) as model:
            for step in range(STEPS):
                if step == faulty_step and (everywhere or mw.current_world().rank == FAULTY):
                    ACTS[act](model)
                result = model.step(mw.split_batch(batch(step), model))
                model.evaluate(mw.split_batch(batch(step + 50), model))
                findings.extend(result.findings)
                losses.append(result.loss)
        return losses

    logging.getLogger("meshwright").addHandler(handler)
    try:
        with torch.enable_grad():  # what a script sets inside ends here
            return _told(run) | {"findings": findings, "logged": logged}
    finally:
        torch.set_default_dtype(torch.float32)
        logging.getLogger("meshwright").removeHandler(handler)
        while _removed_at_the_end:
            _removed_at_the_end.pop().remove()


def other_forms(plan: str, act: str) -> dict[str, Any]:
    """Train while one rank's share has another key, flag or type from a step on, or no sample at all."""
    findings: list[str] = []
    with mw.apply_plan(build, plan, loss_fn=_loss, optimizer=ADAM, seed=3) as model:
        for step in range(STEPS):
            inputs, targets = batch(step)
            if act == "empty":
                inputs, targets = {**inputs, "x": inputs["x"][:1]}, targets[:1]
            share = mw.split_batch((inputs, targets), model)
            if step >= FAULTY_STEP and mw.current_world().rank == FAULTY and act != "empty":
                share = FORMS[act](*share)
            findings.extend(model.step(share).findings)
    return {"kind": None, "text": "", "findings": findings}


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "key": lambda inputs, targets: ({"x": inputs["x"]}, targets),
    "type": lambda inputs, targets: ({**inputs, "factor": 1}, targets),
    "flag": lambda inputs, targets: ({**inputs, "factor": True}, targets),
    "number": lambda inputs, targets: ({**inputs, "factor": 1.0}, targets),
}


def own_loop(plan: str, act: str, kind: type[Net] = Net) -> dict[str, Any]:
    """Train by a loop of the script's own; one rank does something to its loss, its gradient or its batch."""

    def run() -> list[float]:
        losses = []
        with mw.apply_plan(functools.partial(build, kind), plan, optimizer=ADAM, seed=3) as model:
            assert model.optimizer is not None
            for step in range(STEPS):
                is_odd = step == FAULTY_STEP and mw.current_world().rank == FAULTY
                inputs, targets = mw.split_batch(batch(step), model)
                if is_odd and act in ACTS:
                    ACTS[act](model)
                if is_odd and act == "flag":
                    inputs = {**inputs, "factor": 2.0}
                loss = F.cross_entropy(model(**inputs), targets) * (2.0 if is_odd and act == "loss" else 1.0)
                weight = len(targets) * (2 if is_odd and act == "weight" else 1)
                losses.append(float(model.backward(loss, weight=weight)))
                gradient = model.module.get_parameter("head.weight").grad
                if is_odd and act == "gradient" and gradient is not None:
                    gradient.mul_(2)
                model.optimizer.step()
                model.zero_grad()
        return losses

    return _told(run)


FIRST: dict[str, Callable[[Any, Tensor], Any]] = {
    "rows": lambda inputs, labels: ({**inputs, "x": torch.cat([inputs["x"]] * 2)}, torch.cat([labels] * 2)),
    "dtype": lambda inputs, labels: ({**inputs, "x": inputs["x"].to(torch.complex64)}, labels),
    "keys": lambda inputs, labels: ({**inputs, "more": inputs["x"]}, labels),
    "none": lambda inputs, labels: None,
}


def first_form(plan: str, act: str) -> dict[str, Any]:
    """Step on a first batch that has another form on one rank."""

    def run() -> list[float]:
        with mw.apply_plan(functools.partial(build, Net), plan, loss_fn=_loss, optimizer=ADAM, seed=3) as model:
            share = mw.split_batch(batch(0), model)
            return [model.step(FIRST[act](*share) if mw.current_world().rank == FAULTY else share).loss]

    return _told(run)


def deleted(plan: str) -> dict[str, Any]:
    """Delete a parameter on one rank between two steps, and read the plan afterwards."""
    with mw.apply_plan(functools.partial(build, Net), plan, loss_fn=_loss, optimizer=ADAM, seed=3) as model:
        model.step(mw.split_batch(batch(0), model))
        if mw.current_world().rank == FAULTY:
            up: Any = model.module.get_submodule("blocks.0.up")
            del up.bias
            up.bias = None
        told = _told(lambda: [model.step(mw.split_batch(batch(1), model)).loss])
        return told | {"plan": str(model.plan)}
