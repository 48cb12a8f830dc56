"""Modules that torch.compile has compiled: wrapped, in place (`module.compile()`), or by their forward alone."""

from __future__ import annotations

from torch import nn

__all__: list[str] = []


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module's own calls run compiled code."""
    if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
        return True
    forwards = (vars(module).get("forward"), getattr(type(module), "forward", None))
    return any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)


def find_compiled(module: nn.Module) -> str | None:
    """Return how messages call the first part of a module that is compiled; None where none is."""
    for name, child in module.named_modules():
        if is_compiled(child):
            return f"'{name}'" if name else "the model itself"
    return None
