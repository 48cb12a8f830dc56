"""Functions that ranks import: a script that changes, on one rank alone, what modules, the loss and variables hold."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from tests.parity.jobs.apart_jobs import ADAM, FAULTY, FAULTY_STEP, STEPS, batch
from torch import Tensor, nn

import meshwright as mw

FACTOR = 1.0
TABLE = {"factor": 1.0, "deep": {"factor": 1.0}}


class Options:
    """Settings in an object."""

    def __init__(self) -> None:
        self.scale, self.rates = 1.0, [1.0, 1.0]


class Reading(nn.Module):
    """Reads numbers from an object, a dict, a list, a namespace, its class and globals; `notes` is a log of its forward."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.options, self.table, self.space = Options(), {"scale": 1.0}, types.SimpleNamespace(scale=1.0)
        self.notes: list[float] = []
        self.cache: dict[str, Tensor] = {}
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.cache = {"x": x.detach()}
        self.notes.append(float(len(x)))
        x = self.layer(x) * self.options.scale * self.options.rates[0] * self.table["scale"] * self.space.scale
        return self.head(x) * self.gain * FACTOR * TABLE["factor"] * TABLE["deep"]["factor"] * factor  # type: ignore[index]


class Weighing:
    """A loss that is an object with numbers of its own."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, outputs: Tensor, given: Any) -> Tensor:
        return F.cross_entropy(outputs, given[1]) * self.weight


def _closing(kept: dict[str, float]) -> Callable[[Tensor, Any], Tensor]:
    def closed(outputs: Tensor, given: Any) -> Tensor:
        return F.cross_entropy(outputs, given[1]) * kept["weight"]

    return closed


def _set_global(name: str, value: Any) -> None:
    globals()[name] = value


Acts = dict[str, Callable[[Any, Any, dict[str, float]], Any]]
ACTS: Acts = {
    "object": lambda net, loss, kept: setattr(net.options, "scale", 3.0),
    "list": lambda net, loss, kept: net.options.rates.__setitem__(0, 3.0),
    "dict": lambda net, loss, kept: net.table.__setitem__("scale", 3.0),
    "namespace": lambda net, loss, kept: setattr(net.space, "scale", 3.0),
    "replaced": lambda net, loss, kept: setattr(net, "options", types.SimpleNamespace(scale=3.0, rates=[1.0])),
    "class": lambda net, loss, kept: setattr(Reading, "gain", 3.0),
    "global": lambda net, loss, kept: _set_global("FACTOR", 3.0),
    "entry of a global": lambda net, loss, kept: TABLE.__setitem__("factor", 3.0),
    "deep entry": lambda net, loss, kept: TABLE["deep"].__setitem__("factor", 3.0),  # type: ignore[union-attr, attr-defined]
    "loss": lambda net, loss, kept: setattr(loss, "weight", 3.0),
    "closure": lambda net, loss, kept: kept.__setitem__("weight", 3.0),
    "same": lambda net, loss, kept: net.table.__setitem__("scale", float("1.0")),
    "nothing": lambda net, loss, kept: None,
}


def train(
    plan: str, act: str, everywhere: bool = False, own_loop: bool = False, faulty_step: int = FAULTY_STEP
) -> dict[str, Any]:
    """Train; one rank does something before a step and before an evaluation. Findings of all steps and warnings are returned."""
    findings: list[str] = []
    kept = {"weight": 1.0}
    loss_fn: Any = _closing(kept) if act == "closure" else Weighing()
    try:
        with mw.apply_plan(Reading, plan, loss_fn=loss_fn, optimizer=ADAM, seed=3) as model:
            for step in range(STEPS):
                if step == faulty_step and (everywhere or mw.current_world().rank == FAULTY):
                    ACTS[act](model.module, loss_fn, kept)
                given = mw.split_batch(_float(batch(step)), model)
                if own_loop:
                    _step_by_hand(model, given)
                else:
                    findings.extend(model.step(given).findings)
                    model.evaluate(mw.split_batch(_float(batch(step + 50)), model))
    except mw.MeshwrightError as error:
        return {"kind": type(error).__name__, "text": str(error), "findings": findings}
    finally:
        _put_back()
    return {"kind": None, "text": "", "findings": findings}


def _step_by_hand(model: mw.ParallelModel, given: Any) -> None:
    assert model.optimizer is not None
    inputs, targets = given
    model.backward(F.cross_entropy(model(**inputs), targets), weight=len(targets))
    model.optimizer.step()
    model.zero_grad()


def _float(given: Any) -> Any:
    return {**given[0], "x": given[0]["x"].float()}, given[1]


def _put_back() -> None:
    Reading.gain = 1.0
    _set_global("FACTOR", 1.0)
    TABLE.update(factor=1.0, deep={"factor": 1.0})


def growing(num_entries: int) -> int:
    """Train while rank 0 alone logs in what the model's code reads; return how many differences were told."""
    told = 0
    with mw.apply_plan(Reading, "dp=2", loss_fn=Weighing(), optimizer=ADAM, seed=3) as model:
        for step in range(num_entries):
            if mw.current_world().rank == 0:
                TABLE[f"step {step}"] = float(step)
            told += len(model.step(mw.split_batch(_float(batch(step % 3)), model)).findings)
    return told
