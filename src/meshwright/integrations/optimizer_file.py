"""The optimizer's whole state as one device saves it, read back from a checkpoint in which ranks have stored their parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.run.checkpoints.encoded import decode
from meshwright.run.checkpoints.stored_parts import stored_name

__all__: list[str] = []


def names_of_groups(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the FQNs of the parameters of each group, in order; called before a plan gives the optimizer its parts."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def read_whole(path: Path, groups: Sequence[Sequence[str]], options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what ``optimizer.state_dict()`` is on one device.

    Args:
        path: A checkpoint that was just saved, with its optimizer.
        groups: The FQNs of each group's parameters.
        options: Each group's options.
    """
    order = [name for group in groups for name in group]
    with OpenCheckpoint(path) as saved:
        stored = saved.manifest.state["optimizer"]["state"]
        state = {
            number: {key: decode(value, key, saved.read) for key, value in entry.items()}
            for number, name in enumerate(order)
            if (entry := stored.get(stored_name(name))) is not None
        }
    place = iter(range(len(order)))
    dressed = [
        {**{key: value for key, value in one.items() if key != "params"}, "params": [next(place) for _ in group]}
        for group, one in zip(groups, options, strict=True)
    ]
    return {"state": state, "param_groups": dressed}
