"""Another forward for one module: its class is replaced by a subclass, as FSDP2 does.

Names, parameters, hooks, `isinstance` and copies of the module stay right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__: list[str] = []


def with_forward(original: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass with another forward, for a module's `__class__`."""
    members = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)
