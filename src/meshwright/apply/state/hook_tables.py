"""Hook tables of modules at a moment: a forward may register hooks, and the flag that says so is an attribute.

Libraries register hooks in the first forward that asks for hidden states. Where a trial restores the flag and not the hooks,
the next forward registers them a second time, and every layer's output is collected twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from meshwright.apply.state.attributes import OF_TORCH

__all__: list[str] = []

_TABLES = tuple(sorted(name for name in OF_TORCH if name.startswith(("_forward_", "_backward_"))))


@contextlib.contextmanager
def hooks_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the hooks around the forward and backward of some modules after the context, in their order."""
    tables = [getattr(module, name) for module in modules for name in _TABLES]
    held: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = [(table, list(table.items())) for table in tables]
    try:
        yield
    finally:
        for table, then in held:
            if list(table.items()) != then:
                table.clear()
                table.update(then)
