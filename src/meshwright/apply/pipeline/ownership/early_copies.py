"""Copies of a model made before it was cut, such as averages; their parameters no longer pair with a rank's own."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from meshwright.apply.modules.forwards import subclass_with
from meshwright.errors import ApplyError

__all__: list[str] = []


class EarlyCopies:
    """Copies of a model made between now and its cut.

    An average of such a copy pairs its parameters with the model's in their order, which is right for a whole model alone.
    It refuses to take the model's values at any other time: in its own call, which all ranks make, and not where one of them
    meets a parameter that it does not hold.

    Args:
        module: The model; it notices that it is copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original = type(module)
        self._made: list[weakref.ref[nn.Module]] = []
        self._is_whole = False
        made, original = self._made, self._original

        def deepcopy(child: nn.Module, memo: dict[int, Any]) -> nn.Module:
            found = _as_class(original, child, lambda: copy.deepcopy(child, memo))
            made.append(weakref.ref(found))
            return found

        if "__deepcopy__" not in vars(original):
            module.__class__ = subclass_with(original, {"__deepcopy__": deepcopy})

    def end(self) -> None:
        """Stop recording copies: the model is about to be cut."""
        self._module.__class__ = self._original
        theirs = sys.modules.get("torch.optim.swa_utils")
        copies = [found for reference in self._made if (found := reference()) is not None]
        if copies and theirs is not None:
            averages = [item for item in gc.get_objects() if issubclass(type(item), theirs.AveragedModel)]
            for average in averages:
                if any(average.module is found for found in copies):
                    average.__class__ = self._guarded(type(average))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let averages take values inside: the model is whole, and pairs with them."""
        outer, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = outer

    def _is_of_ours(self, model: Any) -> bool:
        """Whether this is the model that was cut, a part of it, or one around it; any other module is whole."""
        if not isinstance(model, nn.Module):
            return True
        own = {id(item) for item in (*self._module.modules(), *self._module.parameters())}
        return any(id(item) in own for item in (*model.modules(), *model.parameters()))

    def _guarded(self, kind: type[Any]) -> type[Any]:
        """Return a class of averages that take values of whole models only; its instances are pickled as those of `kind`."""

        def update_parameters(average: Any, model: nn.Module) -> None:
            if not self._is_whole and self._is_of_ours(model):
                raise ApplyError(
                    "an AveragedModel was made of the model before its first step, while the rank had all of it, and is to "
                    "average what this rank holds now: its parameters would be paired with the wrong ones",
                    fix="update it inside model.whole_parameters(), or make it after the first step, or pass example_batch= to "
                    "apply_plan",
                )
            kind.update_parameters(average, model)

        def deepcopy(average: Any, memo: dict[int, Any]) -> Any:
            found = _as_class(kind, average, lambda: copy.deepcopy(average, memo))
            found.__class__ = type(average)
            return found

        def reduce_ex(average: Any, protocol: Any) -> Any:
            _, args, *state = _as_class(kind, average, lambda: average.__reduce_ex__(max(protocol, 2)))
            return object.__new__, args, *state  # pickle takes copyreg's own function for the object's own class only

        members = {
            "update_parameters": update_parameters,
            "__deepcopy__": deepcopy,
            "__reduce_ex__": reduce_ex,
        }
        return subclass_with(kind, members)


def _as_class(kind: type[Any], item: Any, run: Callable[[], Any]) -> Any:
    """Return what `run` gives while an object has another class."""
    own = type(item)
    item.__class__ = kind
    try:
        return run()
    finally:
        item.__class__ = own
