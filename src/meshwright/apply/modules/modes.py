"""Training and eval mode of modules whose own `train` does more than set a flag: it merges adapters, or freezes norms."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

from torch import nn

from meshwright.apply.state.outside import names_of

__all__: list[str] = []

Modes = list[tuple[nn.Module, bool]]

_OF_VALUES = frozenset({"data", "parameters", "named_parameters", "state_dict", "load_state_dict"})


def modes_of(module: nn.Module) -> Modes:
    """Return each module inside, with its mode."""
    return [(child, child.training) for child in module.modules()]


def set_flags(modes: Modes) -> None:
    """Set modes, and run no code of the modules: for trials, which change nothing else."""
    for child, mode in modes:
        child.training = mode


def set_eval_flags(module: nn.Module) -> None:
    """Put a module in eval mode by flags alone: for trials and copies, whose parameters may be the model's own memory."""
    set_flags([(child, False) for child in module.modules()])


def put_back(modes: Modes) -> None:
    """Put modules back in their modes, by their own `train` where their class has one, as a script would."""
    for child, mode in modes:  # a module before those inside, which its own `train` sets as well
        if child.training != mode:
            if _own_methods(type(child)):
                child.train(mode)
            child.training = mode


def sets_parameters(module: nn.Module) -> bool:
    """Tell whether a switch of the mode runs code that names parameters, as one that merges an adapter does."""
    for child in module.modules():
        methods = _own_methods(type(child))
        if methods and not _OF_VALUES.union(*map(dict.keys, _tables(child))).isdisjoint(
            _names_in(type(child), methods)
        ):
            return True
    return False


def _tables(module: nn.Module) -> Sequence[dict[str, nn.Parameter | None]]:
    return [child._parameters for child in (module, *module.children())]


def _own_methods(kind: type) -> list[Callable[..., object]]:
    """Return `train` and `eval` of a class, where they are not torch's."""
    found = [getattr(kind, name, None) for name in ("train", "eval")]
    return [method for method in found if isinstance(method, types.FunctionType) and not _is_torchs(method)]


def _is_torchs(method: Callable[..., object]) -> bool:
    return method.__module__.partition(".")[0] == "torch"


def _names_in(kind: type, methods: list[Callable[..., object]]) -> set[str]:
    """Return names that methods look up, and the class's own methods that they name."""
    names: set[str] = set()
    waiting, seen = list(methods), set[object]()
    while waiting:
        method = waiting.pop()
        if method in seen or not isinstance(method, types.FunctionType):
            continue
        seen.add(method)
        fresh = names_of(method.__code__)
        names |= fresh
        own = [getattr(kind, name, None) for name in fresh]
        waiting += [found for found in own if isinstance(found, types.FunctionType) and not _is_torchs(found)]
    return names
