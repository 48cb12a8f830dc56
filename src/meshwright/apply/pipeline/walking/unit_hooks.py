"""Interception of unit calls, and of the model's, by the walk under way on this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from meshwright._torch_texts import says_not_assigned
from meshwright.apply.modules.forwards import present_forward, subclass_with
from meshwright.apply.pipeline.walking.stage_forward import StageForward
from meshwright.apply.pipeline.walking.user_hooks import (
    guard_hooks,
    refuse_backward_hooks,
    release_hooks,
    with_backward_hooks,
)
from meshwright.errors import ApplyError

__all__: list[str] = []

Forward = Callable[..., Any]


class UnderWay:
    """The walk under way on this rank, if any."""

    __slots__ = ("walk",)

    def __init__(self) -> None:
        self.walk: StageForward | None = None

    @property
    def watched(self) -> StageForward | None:
        """The walk under way, while code between layers runs."""
        walk = self.walk
        return None if walk is None or walk.is_paused else walk


def refuse_functional_call(error: Exception) -> Exception:
    """Return the error that names torch.func.functional_call where it met a layer of another stage; else the error itself."""
    # Such a layer has no parameters that torch could exchange, and what it says of that does not name the plan.
    if not says_not_assigned(error):
        return error
    return ApplyError(
        "a layer of another stage was called with other parameters than its own (functional_call, or an assignment to one): "
        "a pipeline stage holds only its own layers' parameters",
        fix="use pp=1 (dp, zero and tp allow it)",
    )


class Interception:
    """Modules whose forward is replaced while a stage walks.

    Args:
        module: The model.
        units: Names of the modules whose calls are assigned to stages; of several names of a module the first counts.
        around: The modules outside all units.
        under_way: The walk under way.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[str], around: Sequence[nn.Module], under_way: UnderWay
    ) -> None:
        self._under_way = under_way
        found: dict[int, tuple[nn.Module, str]] = {}
        for name in units:
            unit = module.get_submodule(name)
            found.setdefault(id(unit), (unit, name))
        self._patched = [
            (vars(unit), vars(unit)["forward"], self._of_patched(name, unit))
            for unit, name in found.values()
            if "forward" in vars(unit)
        ]
        changes: list[tuple[nn.Module, Forward | None]] = [
            (unit, None if "forward" in vars(unit) else self._of_unit(name, present_forward(type(unit))))
            for unit, name in found.values()
        ]
        changes += [(child, None) for child in around if child is not module and id(child) not in found]
        if id(module) not in found:
            changes.append((module, None))
        self._classes = [(child, type(child), self._class_of(type(child), forward)) for child, forward in changes]
        self._classes = [self._with_model_end(module, *entry) for entry in self._classes]
        self._set(changed=True)

    def _class_of(self, original: type[nn.Module], forward: Forward | None) -> type[nn.Module]:
        """Return a subclass with another forward, guarded hooks and, for code that asks, the parameters of other stages."""
        under_way = self._under_way

        def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if (child._backward_hooks or child._backward_pre_hooks) and under_way.watched is not None:
                refuse_backward_hooks(child, is_unit=forward is not None)
            if under_way.walk is not None and (child._forward_hooks or child._forward_pre_hooks):
                guard_hooks(child, lambda: under_way.watched)
            return original.__call__(child, *args, **kwargs)

        def named_parameters(
            child: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, nn.Parameter]]:
            if under_way.watched is None:
                return original.named_parameters(child, prefix, recurse, remove_duplicate)
            return _all_parameters(child, prefix, recurse, remove_duplicate)

        def backward_hooks(child: nn.Module) -> tuple[list[Forward], list[Forward]]:
            # Those of a unit are run by the stage that runs it, around its own code.
            return ([], []) if under_way.watched is not None else original._get_backward_hooks(child)

        def backward_pre_hooks(child: nn.Module) -> list[Forward]:
            return [] if under_way.watched is not None else original._get_backward_pre_hooks(child)

        members: dict[str, Any] = {
            "__call__": call,
            "named_parameters": named_parameters,
            "_get_backward_hooks": backward_hooks,
            "_get_backward_pre_hooks": backward_pre_hooks,
        }
        if forward is not None:
            members["forward"] = forward
        return subclass_with(original, members)

    def _with_model_end(
        self, module: nn.Module, child: nn.Module, original: type[nn.Module], changed: type[nn.Module]
    ) -> tuple[nn.Module, type[nn.Module], type[nn.Module]]:
        if child is module:
            inner, under_way = changed.forward, self._under_way

            def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
                outputs = inner(model, *args, **kwargs)
                if under_way.watched is not None:
                    under_way.watched.end_model(outputs)
                return outputs

            changed.forward = forward
        return child, original, changed

    def _of_unit(self, name: str, original: Forward) -> Forward:
        hooked = with_backward_hooks(original)

        def forward(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walk = self._under_way.watched
            if walk is None:
                return original(unit, *args, **kwargs)
            is_hooked = unit._backward_hooks or unit._backward_pre_hooks
            return walk.call_unit(name, unit, hooked if is_hooked else original, args, kwargs)

        return forward

    def _of_patched(self, name: str, unit: nn.Module) -> Forward:
        patched = vars(unit)["forward"]

        def forward(*args: Any, **kwargs: Any) -> Any:
            walk = self._under_way.watched
            if walk is None:
                return patched(*args, **kwargs)
            return walk.call_unit(name, unit, lambda _, *given, **named: patched(*given, **named), args, kwargs)

        return forward

    def _set(self, *, changed: bool) -> None:
        for unit, original, other in self._classes:
            unit.__class__ = other if changed else original
        for attributes, original_forward, other_forward in self._patched:
            attributes["forward"] = other_forward if changed else original_forward

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Give the modules their own classes inside the context."""
        self._set(changed=False)
        try:
            yield
        finally:
            self._set(changed=True)

    def close(self) -> None:
        """Restore the modules' own classes and hooks."""
        self._set(changed=False)
        release_hooks(child for child, _, _ in self._classes)


def _all_parameters(
    module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters, those of other stages too: code may ask for their dtype and device."""
    seen: set[int] = set()
    for name, child in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        absent = [(key, item) for key, item in vars(child).items() if isinstance(item, nn.Parameter)]
        for key, parameter in [*child._parameters.items(), *absent]:
            if parameter is not None and not (remove_duplicate and id(parameter) in seen):
                seen.add(id(parameter))
                yield f"{name}.{key}" if name else key, parameter
