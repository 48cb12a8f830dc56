"""Hook tables of modules and parameters at a moment: a forward may register hooks, and the flag that says so is an attribute.

Libraries register hooks in the first forward that asks for hidden states. Where a trial restores the flag and not the hooks,
the next forward registers them a second time, and every layer's output is collected twice. A hook of a parameter that a trial
leaves behind changes the gradient once more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.state.attributes import OF_TORCH

__all__: list[str] = []

_TABLES = tuple(sorted(name for name in OF_TORCH if name.startswith(("_forward_", "_backward_"))))


def is_ours(hook: Any) -> bool:
    """Tell whether a hook belongs to this package; such a hook changes nothing."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").split(".")[0] == "meshwright"


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


class ParameterHooks:
    """The hooks that a module's parameters have at one moment, for their gradients."""

    def __init__(self, module: nn.Module) -> None:
        # Past the methods of the dicts, which gather values under ZeRO-3: this may run on one rank alone.
        held = (value for child in module.modules() for value in dict.values(child._parameters))
        self._parameters = list({id(value): value for value in held if value is not None}.values())
        with without_function_modes():
            self._held = [(table, list((table or {}).items())) for table in self._tables()]

    def _tables(self) -> Iterator[dict[int, Any] | None]:
        for parameter in self._parameters:
            yield parameter._backward_hooks
            yield parameter._post_accumulate_grad_hooks

    def have_changed(self) -> bool:
        """Tell whether a parameter has other hooks now."""
        with without_function_modes():
            return any(
                list((now or {}).items()) != then for now, (_, then) in zip(self._tables(), self._held, strict=True)
            )

    def restore(self) -> None:
        """Give all parameters the hooks that they had."""
        with without_function_modes():
            for now, (table, then) in zip(self._tables(), self._held, strict=True):
                for own in (now, table):
                    if own is not None and list(own.items()) != then:
                        own.clear()  # torch calls an empty table, and nothing happens
                        own.update(then)
