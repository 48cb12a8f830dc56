"""Two promises that are checked: all ranks hold one model and one plan, and nobody changes the model afterwards."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError

__all__: list[str] = []


def describe_tensors(module: nn.Module) -> list[list[Any]]:
    """Return [kind, FQN, shape, dtype, requires_grad, FQN of the tensor it shares] for each parameter and buffer."""
    first_name: dict[int, str] = {}
    rows: list[list[Any]] = []
    kinds = (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    )
    for kind, named in kinds:
        for name, tensor in named:
            tied_to = first_name.setdefault(id(tensor), name)
            rows.append(
                [
                    kind,
                    name,
                    list(tensor.shape),
                    str(tensor.dtype),
                    tensor.requires_grad,
                    tied_to if tied_to != name else None,
                ]
            )
    return rows


def require_equal_on_ranks(group: Communicator, module: nn.Module, plan_json: str, device: torch.device) -> None:
    """Refuse to start where ranks hold different plans or different models.

    Raises:
        ApplyError: On every rank, naming the first difference and both sides.
    """
    if group.size == 1:
        return
    rows = describe_tensors(module)
    digests = group.all_gather_json([_digest(plan_json), _digest(json.dumps(rows))], device=device)
    if len({plan for plan, _ in digests}) > 1:
        plans = group.all_gather_json(plan_json, device=device)
        other = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
        raise ApplyError(
            f"ranks hold different plans: rank 0 has {plans[0]}, rank {other} has {plans[other]}",
            fix="give every rank the same plan",
        )
    if len({model for _, model in digests}) > 1:
        everyone = group.all_gather_json(rows, device=device)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise ApplyError(
            f"ranks hold different models: {_first_difference(everyone[0], everyone[other], other)}",
            fix="build the model the same way on every rank: no rank-dependent branch, no unordered set of layers",
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _first_difference(mine: list[list[Any]], theirs: list[list[Any]], other: int) -> str:
    for left, right in zip(mine, theirs, strict=False):
        if left != right:
            return f"rank 0 has {_row_text(left)}, rank {other} has {_row_text(right)}"
    longer, rank = (mine, 0) if len(mine) > len(theirs) else (theirs, other)
    extra = longer[min(len(mine), len(theirs))]
    return f"rank 0 has {len(mine)} tensors, rank {other} has {len(theirs)}: only rank {rank} has {_row_text(extra)}"


def _row_text(row: list[Any]) -> str:
    kind, name, shape, dtype, requires_grad, tied_to = row
    tied = f", tied to '{tied_to}'" if tied_to else ""
    return f"{kind} '{name}' of shape {tuple(shape)}, {dtype}, requires_grad={requires_grad}{tied}"


class ModelGuard:
    """Notices parameters that were replaced, modules that were added, and `requires_grad` that was switched.

    One look costs about 0.1 microseconds a module; it is taken at the start of each step.

    Args:
        module: The module as it was when the plan was applied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [
            (own._parameters, name, parameter, f"{prefix}.{name}" if prefix else name)
            for prefix, own in module.named_modules()
            for name, parameter in own._parameters.items()
        ]
        self._counts = [
            (own._modules, len(own._modules), own._parameters, len(own._parameters), prefix)
            for prefix, own in module.named_modules()
        ]
        self._trainable = [parameter for _, _, parameter, _ in self._parameters if parameter is not None]
        self._names = [fqn for _, _, parameter, fqn in self._parameters if parameter is not None]
        self._requires_grad = self._read_requires_grad()

    def _read_requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._trainable]

    def find_change(self) -> ApplyError | None:
        """Return the error where a parameter was replaced or a module or parameter was added or removed, else None."""
        for owner, name, parameter, fqn in self._parameters:
            if owner.get(name) is not parameter:
                return ApplyError(
                    f"parameter '{fqn}' was replaced after the plan was applied; the new one would not be trained",
                    fix="change its values in place (parameter.data.copy_(...)), or apply the plan again",
                )
        for modules, num_modules, parameters, num_parameters, prefix in self._counts:
            if len(modules) != num_modules or len(parameters) != num_parameters:
                return ApplyError(
                    f"module '{prefix or '(the model itself)'}' had {num_modules} children and {num_parameters} "
                    f"parameters when the plan was applied, and has {len(modules)} and {len(parameters)} now",
                    fix="change the model before apply_plan, or apply the plan again",
                )
        return None

    def find_switched(self) -> str | None:
        """Return the FQN of a parameter whose `requires_grad` was switched since the last `accept_trainable`, or None."""
        now = self._read_requires_grad()
        if now == self._requires_grad:
            return None
        return next(name for name, new, old in zip(self._names, now, self._requires_grad, strict=True) if new != old)

    def accept_trainable(self) -> list[bool]:
        """Take the present `requires_grad` of each parameter as the new state, and return it."""
        self._requires_grad = self._read_requires_grad()
        return self._requires_grad
