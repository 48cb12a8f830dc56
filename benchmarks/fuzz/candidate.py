"""The other side: the same script under a plan, on every rank."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import traceback
from typing import Any

import torch
from benchmarks.error_rows import describe_error
from benchmarks.fuzz import data, script
from benchmarks.fuzz.losses import LossFunction, logits_of
from benchmarks.fuzz.models import build_model
from benchmarks.fuzz.optim import Factory
from benchmarks.fuzz.oracle import SEED, saved_buffers, to_array
from torch import nn

import meshwright as mw
from meshwright.measure.recording import GradientRecorder

_CUT = re.compile(r"cuts ([0-9.]+)% of")


class PlanTrainer:
    """Trains under a plan."""

    as_array = staticmethod(to_array)

    def __init__(self, program: dict[str, Any]) -> None:
        self.form, self.ragged = program["loss"], program.get("ragged", False)
        build: Any = functools.partial(build_model, json.dumps(program["model"]))
        factory = Factory(program["optimizer"])
        optimizer: Any = factory
        if factory.needs_module or program.get("built_first"):
            build = build_first(build)
        if factory.needs_module:
            optimizer = factory.of_module(build)
        loss_fn = None
        if self.form["kind"] != "own":
            # A user's closure holds the module that was handed over; where it is built inside, a forward reference.
            loss_fn = LossFunction(self.form, build if isinstance(build, nn.Module) else None, mw.Loss)
        one_process = program["mode"] in ("data_parallel", "model_parallel")
        self.model = mw.apply_plan(
            build,
            mw.Plan.parse(program["plan"], num_devices=2 if one_process else None),
            loss_fn=loss_fn,
            optimizer=optimizer,
            seed=SEED,
            max_grad_norm=program.get("clip"),
            devices=["cpu"] * 2 if one_process else None,
            **program.get("options", {}),
        )
        if loss_fn is not None and loss_fn.module is None:
            loss_fn.module = self.model.module
        self.loss_fn = loss_fn
        self.seen = GradientRecorder(self.model)
        world = mw.current_world()
        self.is_first = world is None or world.rank == 0

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return self.model.whole_parameters()

    def step(self, batch: Any) -> dict[str, Any]:
        self.seen.gradients = {}
        share = mw.split_batch(batch, self.model)
        result = self.model.step(data.trimmed(share) if self.ragged else share)
        grads = {name: to_array(g) for name, g in self.seen.gradients.items()}
        return {"loss": result.loss, "norm": result.grad_norm, "grads": grads, **self.read_all()}

    def read_all(self) -> dict[str, Any]:
        with self.model.whole_parameters():
            return {
                "values": {name: to_array(p) for name, p in self.module.named_parameters()},
                "buffers": saved_buffers(self.module),
            }

    def evaluate(self, batch: Any) -> float:
        return self.model.evaluate(mw.split_batch(batch, self.model))["loss"]

    def forward(self, batch: Any) -> Any:
        return to_array(logits_of(data.call(self.model, batch)).detach())

    def state(self) -> dict[str, Any]:
        return {name: to_array(value) for name, value in self.model.full_state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})

    def own_step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        batch = mw.split_batch(batch, self.model)
        outputs = data.call(self.model, batch)
        loss = outputs.loss if self.form["kind"] == "own" else self.loss_fn(outputs, batch)
        (loss.sum / loss.weight if isinstance(loss, mw.Loss) else loss).backward()
        self.optimizer.step()


def build_first(build: Any) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def run_under_plan(program: dict[str, Any]) -> dict[str, Any]:
    """Run the program on this rank; its records, its error if it raised, and how much was cut."""
    records: list[dict[str, Any]] = []
    trainer = None
    found: dict[str, Any] = {"records": records, "error": None, "cut": None, "reasons": [], "joined": False}
    try:
        trainer = PlanTrainer(program)
        script.play(program, trainer, records)
        found["reasons"] = [str(reason) for reason in trainer.model.plan.reasons][:6]
        cuts = _CUT.findall(" ".join(found["reasons"]))
        found["cut"] = float(cuts[0]) / 100 if cuts else None
    except Exception as error:
        found["error"] = describe_error(error)
        found["traceback"] = "".join(traceback.format_exception(error))[-3000:]
    finally:
        if trainer is not None:
            found["joined"] = bool(trainer.model.engine.joined_reasons)
            with contextlib.suppress(Exception):
                trainer.model.close()
    return found
