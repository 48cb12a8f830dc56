"""A training script from its description, played on either side: steps, evaluations, and what users do between them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from benchmarks.fuzz import data
from benchmarks.fuzz.models import part_of
from torch import nn


def play(program: dict[str, Any], trainer: Any, records: list[dict[str, Any]]) -> None:
    """Play the script; records are appended as they are made, so that those before an exception are there."""
    kept: dict[str, Any] = {"program": program}
    for index, action in enumerate(program["script"]):
        found = ACTIONS[action["do"]](trainer, program, action, kept)
        if found is not None:
            records.append({"action": index, "do": action["do"], **found})


def _step(trainer: Any, program: dict[str, Any], action: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    if action.get("misfed") and not trainer.is_first:
        action = {**action, "batch": action["batch"] + 1000}  # ranks that share layers are to see one batch
    found = trainer.step(data.make_batch(program, action))
    if "scheduler" in kept:
        kept["scheduler"].step()
    if "average" in kept:
        kept["average"].update_parameters(trainer.module)
    return found


def _eval(trainer: Any, program: dict[str, Any], action: dict[str, Any], _: Any) -> dict[str, Any]:
    return {"loss": trainer.evaluate(data.make_batch(program, action))}


def _forward(trainer: Any, program: dict[str, Any], action: dict[str, Any], _: Any) -> dict[str, Any]:
    return {"tensors": {"logits": trainer.forward(data.make_batch(program, action))}}


def _state(trainer: Any, _: Any, action: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    state = trainer.state()
    if action.get("keep"):
        kept["state"] = state
    return {"tensors": state}


def _load(trainer: Any, _: Any, __: Any, kept: dict[str, Any]) -> None:
    if "state" in kept:
        trainer.load(kept["state"])


def _freeze(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    for parameter in part_of(trainer.module, action["what"]):
        parameter.requires_grad_(False)


def _unfreeze(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    chosen = list(trainer.module.parameters()) if action["what"] == "all" else part_of(trainer.module, action["what"])
    for parameter in chosen:
        parameter.requires_grad_(True)


def _lr(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["lr"] * action["factor"]


def _scheduler(trainer: Any, _: Any, __: Any, kept: dict[str, Any]) -> None:
    kept["scheduler"] = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1, gamma=0.7)


def _set(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    owner: Any = trainer.module.get_submodule(action.get("of", ""))
    setattr(owner, action["name"], action["value"])


def _mode(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    trainer.module.get_submodule(action.get("of", "")).train(action["training"])


def _scale(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            if not parameter.is_complex():
                parameter.clamp_(-action["bound"], action["bound"])


def _grow(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    with torch.no_grad():
        for parameter in part_of(trainer.module, "stem"):
            parameter.mul_(action["factor"])


def _rebind(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    for parameter in trainer.module.parameters():
        parameter.data = parameter.data.clone()


def _vector(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    parameters = [p for p in trainer.module.parameters() if not p.is_complex()]
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(0.95 * vector.detach(), parameters)


def _add_group(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    fresh = [p for p in trainer.module.parameters() if id(p) not in held]
    trainer.optimizer.add_param_group({"params": fresh, "lr": action.get("lr", 0.1)})


def _copy(trainer: Any, program: dict[str, Any], action: dict[str, Any], _: Any) -> dict[str, Any]:
    """Copy the module, as for a teacher, and read the copy's values."""
    with trainer.reading() if action.get("inside") else contextlib.nullcontext():
        other = copy.deepcopy(trainer.module)
    return {"tensors": {name: trainer.as_array(p) for name, p in other.named_parameters()}}


def _average(trainer: Any, _: Any, action: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any] | None:
    """Begin an average of the parameters; the second time, read it."""
    if "average" not in kept:
        with trainer.reading() if action.get("inside") else contextlib.nullcontext():
            kept["average"] = torch.optim.swa_utils.AveragedModel(trainer.module)
        return None
    named = kept["average"].module.named_parameters()
    return {"tensors": {name: trainer.as_array(p) for name, p in named}}


def _replace(trainer: Any, program: dict[str, Any], __: Any, ___: Any) -> None:
    old = trainer.module.head.proj
    torch.manual_seed(17)
    new = nn.Linear(old.in_features, program["model"]["outputs"], bias=old.bias is not None).double()
    trainer.module.head.proj = new


def _reorder(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    blocks = trainer.module.blocks
    blocks[0], blocks[-1] = blocks[-1], blocks[0]


def _own_step(trainer: Any, program: dict[str, Any], action: dict[str, Any], _: Any) -> dict[str, Any]:
    trainer.own_step(data.make_batch(program, action))
    return trainer.read_all()


def _optimizer_state(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))


def _zero_grad(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    trainer.optimizer.zero_grad()


def _hook(trainer: Any, _: Any, action: dict[str, Any], __: Any) -> None:
    """Register a hook that counts, on all ranks or on the first alone."""
    if action.get("everywhere") or trainer.is_first:
        next(iter(trainer.module.parameters())).register_post_accumulate_grad_hook(_count)


def _draw(trainer: Any, _: Any, __: Any, ___: Any) -> None:
    """Draw a number on one rank alone, as for a sample that is printed."""
    if trainer.is_first:
        torch.rand(1)


def _count(parameter: Any) -> None:
    parameter.arrived = getattr(parameter, "arrived", 0) + 1


ACTIONS: dict[str, Any] = {
    "step": _step,
    "eval": _eval,
    "forward": _forward,
    "state": _state,
    "load": _load,
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "lr": _lr,
    "scheduler": _scheduler,
    "set": _set,
    "mode": _mode,
    "clamp": _scale,
    "grow": _grow,
    "rebind": _rebind,
    "vector": _vector,
    "add_group": _add_group,
    "copy": _copy,
    "average": _average,
    "replace": _replace,
    "reorder": _reorder,
    "own_step": _own_step,
    "optimizer_state": _optimizer_state,
    "zero_grad": _zero_grad,
    "hook": _hook,
    "draw": _draw,
}
