"""Wishes that a plan's `layouts` may hold, and models whose data flow cannot be followed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.apply.modules.compiled import refuse_compiled
from meshwright.errors import ApplyError, did_you_mean

__all__: list[str] = []

WISHES = ("whole", "column", "row", "vocabulary", "stored")
"""What a plan's `layouts` may say of a parameter."""


def refuse_unknown(module: nn.Module, wanted: Mapping[str, str]) -> None:
    """Raise ApplyError where a plan's layouts (FQN -> wish) name what is no parameter, or wish for what is not known."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name, wish in wanted.items():
        if name not in names:
            raise ApplyError(
                f"the plan's layouts name '{name}', which is no parameter of the model{did_you_mean(name, names)}",
                fix="use the names of named_parameters()",
            )
        if wish not in WISHES:
            raise ApplyError(
                f"the plan's layout of '{name}' is '{wish}'{did_you_mean(wish, WISHES)}; known: {', '.join(WISHES)}",
                fix=f"layouts={{'{name}': 'whole'}}",
            )


def refuse_opaque(module: nn.Module, num_ranks: int) -> None:
    """Raise ApplyError where a part of the model is compiled, and cannot be followed by the ranks that share its layers."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ApplyError(
                f"'{name or 'the model itself'}' is compiled, and what happens inside cannot be followed; "
                f"tp={num_ranks} needs to see which tensors feed which",
                fix="pass the model before torch.jit",
            )
    refuse_compiled(
        module, f"tp={num_ranks} needs to see which tensors feed which: what happens inside cannot be followed"
    )
