"""Modules that torch.compile has compiled: wrapped, in place (`module.compile()`), or by their forward alone."""

from __future__ import annotations

from torch import nn

from meshwright.errors import ApplyError

__all__: list[str] = []

_FIX = (
    "leave torch.compile out, or use dp=N with zero=2 at most, whose modules may be compiled; under every plan a forward may "
    "call functions that are compiled by themselves"
)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module's own calls run compiled code."""
    if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
        return True
    forwards = (vars(module).get("forward"), getattr(type(module), "forward", None))
    return any(
        hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)
        for forward in forwards
    )


def compiled_error(name: str, why: str) -> ApplyError:
    """Return the error for a module of this FQN whose calls must not be compiled.

    Args:
        name: The FQN.
        why: What the plan does with its calls.
    """
    return ApplyError(f"{repr(name) if name else 'the model itself'} is compiled, and {why}", fix=_FIX)


def refuse_compiled(module: nn.Module, why: str) -> None:
    """Refuse a module of which any part is compiled.

    Args:
        module: The module.
        why: What the plan does with its calls.

    Raises:
        ApplyError: A part is compiled.
    """
    for name, child in module.named_modules():
        if is_compiled(child):
            raise compiled_error(name, why)
