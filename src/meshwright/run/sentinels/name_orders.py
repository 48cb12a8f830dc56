"""Orders of names in lists that modules keep, taken from the first rank: a list made of a set has another in each process.

What ranks do alike must not depend on it. Where lists differ in nothing but order, all ranks get the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.run.sentinels.settings import Rows, require_equal_settings

__all__: list[str] = []

_DEPTH = 4


def require_equal_in_order(
    group: Communicator, module: nn.Module, rows: Callable[[], Rows], device: torch.device
) -> None:
    """Refuse to continue where ranks have different settings, even with the names in lists in the first rank's order.

    Every rank calls this.

    Args:
        group: The ranks.
        module: The model.
        rows: Returns this rank's settings.
        device: Where they exchange.

    Raises:
        ApplyError: On every rank, naming the first setting that differs, with both values.
    """
    try:
        require_equal_settings(group, rows(), device)
    except ApplyError:  # on all ranks
        align_orders(group, module, device)
        require_equal_settings(group, rows(), device)


def align_orders(group: Communicator, module: nn.Module, device: torch.device) -> None:
    """Give all ranks the first one's order of names in lists among the attributes of modules.

    Every rank calls this. Lists of other entries, or that differ in more than order, stay as they are.
    """
    own = dict(_lists_of(module))
    everyone = group.all_gather_json([[path, list(names)] for path, names in own.items()], device=device)
    first = dict(everyone[0])
    for path, names in own.items():
        wanted = first.get(path, names)
        if wanted != names and sorted(wanted) == sorted(names):
            names[:] = wanted


def _lists_of(module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, (list, Mapping)):
                yield from _lists_in(value, f"{name}.{key}", _DEPTH)


def _lists_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, list) and len(value) > 1 and all(type(item) is str for item in value):
        yield path, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lists_in(item, f"{path}.{key}", depth - 1)
