"""Functions that ranks import: plans in which one rank has another setting, and inspections by an engine of the test's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from tests.parity import losses
from tests.parity.jobs.sentinel_jobs import ADAM, FAULTY, SGD, Net, build_net, language, rank, step_until_told
from torch import Tensor, nn

import meshwright as mw
from meshwright.apply.finding import Finding


def _other_loss(outputs: Tensor, batch: Any) -> Tensor:
    return losses.cross_entropy(outputs, batch) * 2


def _build_other_activation() -> nn.Module:
    model = Net()
    model.blocks[1].act = nn.Tanh()
    return model.double()


def _build_other_temperature() -> nn.Module:
    return Net(temperature=2.0).double()


def _loss_of(factor: float) -> Callable[[Tensor, Any], Tensor]:
    return lambda outputs, batch: losses.cross_entropy(outputs, batch) * factor


def _freeze_and_optimize(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *rest = parameters
    return ADAM([first.requires_grad_(False), *rest])


OTHERS: dict[str, dict[str, Any]] = {
    "trainable": {"optimizer": _freeze_and_optimize},
    "lr": {"optimizer": functools.partial(torch.optim.Adam, lr=0.02)},
    "betas": {"optimizer": functools.partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))},
    "optimizer": {"optimizer": SGD},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "non_finite": {"non_finite": "skip"},
    "seed": {"seed": 1},
    "loss": {"loss_fn": _other_loss},
    "closure": {"loss_fn": _loss_of(2.0)},
    "activation": {"build_model": _build_other_activation},
    "temperature": {"build_model": _build_other_temperature},
    "sentinel_every": {"sentinel_every": 5},
}


def apply_with_others(plan: str, which: str) -> dict[str, Any]:
    """Apply a plan with one setting that is another on one rank."""
    options: dict[str, Any] = {"build_model": build_net, "optimizer": ADAM, "loss_fn": losses.cross_entropy}
    if which == "closure":
        options["loss_fn"] = _loss_of(1.0)
    if rank() == FAULTY:
        options |= OTHERS[which]
    build = options.pop("build_model")
    with mw.apply_plan(build, plan, **options) as model:
        return step_until_told(model, 1, lambda number, model, share: share)


def apply_with_precision(plan: str) -> Any:
    """As `apply_with_others`, with another float32 precision of torch on one rank."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if rank() == FAULTY else "highest")
        with mw.apply_plan(build_net, plan, loss_fn=losses.cross_entropy):
            return None
    finally:
        torch.set_float32_matmul_precision(before)


# -- inspections ------------------------------------------------------------------------------------------------------


def train_with_inspections(plan: str, on_finding: Literal["stop", "warn"], fails_at: int) -> dict[str, Any]:
    """Train with an engine whose inspection number `fails_at` finds something on one rank."""
    with mw.apply_plan(
        build_net, plan, optimizer=SGD, loss_fn=losses.cross_entropy, sentinel_every=2, on_finding=on_finding
    ) as model:
        begun: list[int] = []

        def begin(number: int) -> str:
            begun.append(number)
            return "blocks.0"

        def end() -> list[Finding]:
            if begun[-1] != fails_at or rank() != FAULTY:
                return []
            return [Finding(part="blocks.0", difference=0.25, tolerance=1e-9, text="its output is not one device's")]

        engine: Any = model.engine
        engine.begin_inspection, engine.end_inspection = begin, end
        weights = [parameter.detach().clone() for parameter in model.module.parameters()]
        told = step_until_told(model, 6, lambda number, model, share: share)
        same = all(torch.equal(p, old) for p, old in zip(model.module.parameters(), weights, strict=True))
        return told | {"begun": begun, "has_not_moved": same}


def count_exchanges(plan: str, every: int) -> list[int]:
    """Return the exchanges of each of some steps."""
    with mw.apply_plan(build_net, plan, optimizer=SGD, loss_fn=losses.cross_entropy, sentinel_every=every) as model:
        counts = []
        for number in range(5):
            before = sum(entry.num_calls for entry in model.ledger.entries.values())
            model.step(mw.split_batch(language(8, number), model))
            counts.append(sum(entry.num_calls for entry in model.ledger.entries.values()) - before)
        return counts
