"""Users' hooks on layers: each runs on the stage that has the tensors it reads, and must not steer the forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from meshwright.apply.modules.hooks import OwnHook
from meshwright.apply.pipeline.walking.stand_ins import OtherParameterError, StrayValueError
from meshwright.apply.pipeline.walking.without_numbers import ReadsValueError
from meshwright.errors import ApplyError

__all__: list[str] = []


class Watcher(Protocol):
    """A forward that is traced or walked."""

    def in_hook(self) -> contextlib.AbstractContextManager[None]:
        """Run a hook inside the context: it is not part of the forward's path."""
        ...


class GuardedHook:
    """A user's hook, abandoned where it reads a value of another stage; that stage runs it to its end.

    Args:
        hook: The user's.
        watcher: Returns the forward under way, if any.
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
        except OtherParameterError:
            if computes_weights(self.hook):
                return None  # spectral_norm of old writes buffers by the layer's weight: they are the layer's stage's
            raise


def computes_weights(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook before a forward computes a weight: weight_norm, spectral_norm and pruning of old."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def guard_hooks(module: nn.Module, watcher: Callable[[], Watcher | None]) -> None:
    """Guard the hooks that a module has now."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in hooks.items():
            if type(hook) is not GuardedHook and not (isinstance(hook, OwnHook) and hook.only_looks):
                hooks[key] = GuardedHook(hook, watcher)


def with_backward_hooks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward with its backward hooks around it, as `nn.Module.__call__` runs them."""

    def hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks, _ = module._get_backward_hooks()
        hook = BackwardHook(module, hooks, module._get_backward_pre_hooks())
        return hook.setup_output_hook(forward(module, *hook.setup_input_hook(args), **kwargs))

    return hooked


def refuse_backward_hooks(module: nn.Module, *, is_unit: bool) -> None:
    """Refuse backward hooks that cannot run on one stage, where gradients are enabled.

    Raises:
        ApplyError: The module calls layers of several stages, or its hooks cannot be run around its own code alone.
    """
    if not torch.is_grad_enabled():
        return
    if not is_unit:
        why = "its layers may be on several stages"
    elif module._forward_hooks:
        why = "it has a forward hook, too, whose result the backward hook would see first"
    elif module._backward_hooks and not module._is_full_backward_hook:
        why = "it is not a full one (register_backward_hook), so it sees only one operation of the layer"
    else:
        return
    raise ApplyError(
        f"a {type(module).__name__} of the pipeline has a backward hook, and {why}",
        fix="use register_full_backward_hook on the layers inside, on those without a forward hook; or hook tensors in a "
        "layer's forward; or use pp=1 (dp and zero allow it)",
    )


def release_hooks(modules: Iterable[nn.Module]) -> None:
    """Restore the modules' own hooks."""
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in hooks.items():
                if isinstance(hook, GuardedHook):
                    hooks[key] = hook.hook
