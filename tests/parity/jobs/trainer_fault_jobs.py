"""Trainers of which one rank has other arguments or callbacks, or raises, and checkpoints of interrupted saves."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.parity.jobs import trainer_jobs
from tests.parity.jobs.trainer_jobs import Found

import meshwright as mw

EVERY = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}


class Asks(transformers.TrainerCallback):
    """Asks for something, or raises, at the end of a step, on one rank."""

    def __init__(self, rank: int, step: int, flag: str) -> None:
        self.at, self.flag = (rank, step), flag

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (mw.join_world().rank, state.global_step) != self.at:
            return
        if self.flag == "raise":
            raise ValueError("the callback's own")
        setattr(control, self.flag, True)


class Reads(transformers.TrainerCallback):
    """Reads a whole parameter at the end of each step, as a script does that knows of no plan, or by the fix of its error."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.found: list[float] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        weight = next(model.parameters())
        with self.trainer.parallel.whole_parameters() if self.how == "whole" else contextlib.nullcontext():
            if self.how in ("plain", "whole"):
                self.found.append(float(weight.detach().norm()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        if self.how == "clips":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read_in_a_callback(plan: str, directory: str, how: str) -> list[float]:
    """Train three steps with such a callback; return what it has read."""
    from meshwright.integrations.hf_trainer import Trainer

    reads = Reads(how)
    args = trainer_jobs.arguments(directory, save_strategy="no", eval_strategy="no", max_steps=3)
    trainer = Trainer(
        trainer_jobs.build("regression"), args, train_dataset=trainer_jobs.Points(), plan=plan, callbacks=[reads]
    )
    reads.trainer = trainer
    trainer.train()
    assert trainer.parallel is not None
    trainer.parallel.close()
    return reads.found


def train(
    plan: str,
    directory: str,
    resume: Any = None,
    changes: dict[str, Any] | None = None,
    of_rank_1: dict[str, Any] | None = None,
    asks: tuple[int, int, str] | None = None,
    metric: str = "same",
) -> Found:
    """Train on rows of numbers; return the steps, the losses of each, and where evaluations and saves were."""
    from meshwright.integrations.hf_trainer import Trainer

    transformers.utils.logging.set_verbosity_error()
    rank = mw.join_world().rank
    args = {**EVERY, **(changes or {}), **((of_rank_1 or {}) if rank == 1 else {})}
    data = trainer_jobs.Points()
    trainer = Trainer(
        trainer_jobs.build("regression"), trainer_jobs.arguments(directory, **args), train_dataset=data,
        eval_dataset=data, plan=plan, callbacks=[Asks(*asks)] if asks else [],
        compute_metrics=functools.partial(measured, rank if metric == "by rank" else 0),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    assert trainer.parallel is not None
    trainer.parallel.close()
    return {
        "steps": trainer.state.global_step,
        "losses": {log["step"]: log["loss"] for log in logs if "loss" in log},
        "evaluated": [log["step"] for log in logs if "eval_loss" in log],
        "saved": sorted(name for name in os.listdir(directory) if name.startswith("checkpoint-")),
    }


def measured(more: int, predicted: Any) -> dict[str, float]:
    return {"size": float(abs(predicted.predictions).mean()) + more}


def harm(checkpoint: Path, how: str) -> None:
    """Damage a checkpoint as an interrupted save, a disk or a mistake does."""
    parts = next((checkpoint / "meshwright").glob("step-*")) / "rank-00001.safetensors"
    if how == "interrupted":
        (checkpoint / "meshwright.json").unlink()
        (checkpoint / "trainer_state.json").unlink()
    elif how == "cut state":
        (checkpoint / "meshwright.json").unlink()
        os.truncate(checkpoint / "trainer_state.json", 100)
    elif how == "cut weights":
        os.truncate(checkpoint / "model.safetensors", (checkpoint / "model.safetensors").stat().st_size // 2)
    elif how == "another's schedule":
        other = checkpoint.with_name("checkpoint-2") / "scheduler.pt"
        (checkpoint / "scheduler.pt").write_bytes(other.read_bytes())
    elif how == "no generators":
        (checkpoint / "rng_state.pth").unlink()
    else:
        data = bytearray(parts.read_bytes())
        data[-1] ^= 1
        parts.write_bytes(data)
