"""Users' hooks on layers: each runs where the tensors are that it reads, and what it reads decides nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from meshwright.apply.pipeline.shapes import ReadsValueError
from meshwright.apply.pipeline.values import StrayValueError

__all__: list[str] = []


class Watcher(Protocol):
    """What follows a forward."""

    def in_hook(self) -> contextlib.AbstractContextManager[None]:
        """Run a hook inside: what it does is no part of the forward's way."""
        ...


class GuardedHook:
    """A hook that is given up where it reads a number that another stage has: it runs to its end on that stage.

    Args:
        hook: The user's.
        watcher: Gives what follows the forward that is under way, if any.
    """

    def __init__(self, hook: Callable[..., Any], watcher: Callable[[], Watcher | None]) -> None:
        self.hook = hook
        self._watcher = watcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook."""
        watcher = self._watcher()
        if watcher is None:
            return self.hook(*args, **kwargs)
        try:
            with watcher.in_hook():
                return self.hook(*args, **kwargs)
        except (ReadsValueError, StrayValueError):
            return None


def guard_hooks(module: nn.Module, watcher: Callable[[], Watcher | None]) -> None:
    """Guard the hooks that a module has by now."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in hooks.items():
            if type(hook) is not GuardedHook:
                hooks[key] = GuardedHook(hook, watcher)


def release_hooks(modules: Iterable[nn.Module]) -> None:
    """Give modules their own hooks back."""
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in hooks.items():
                if isinstance(hook, GuardedHook):
                    hooks[key] = hook.hook
