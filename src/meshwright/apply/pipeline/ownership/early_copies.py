"""Copies of a model that were made before it was cut: their parameters do not pair with those that a rank holds afterwards."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

from torch import nn

from meshwright.errors import ApplyError

__all__: list[str] = []


class EarlyCopies:
    """The copies of a model that are made from now on, until it is cut.

    Args:
        module: The model; it notices that it is copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original = type(module)
        self._made: list[weakref.ref[nn.Module]] = []
        self._averages: list[weakref.ref[Any]] = []
        self._accepted: dict[weakref.ref[Any], int] = {}
        made, original = self._made, self._original

        def deepcopy(child: nn.Module, memo: dict[int, Any]) -> nn.Module:
            noticing = type(child)
            child.__class__ = original
            try:
                found = copy.deepcopy(child, memo)
            finally:
                child.__class__ = noticing
            made.append(weakref.ref(found))
            return found

        if "__deepcopy__" not in vars(original):
            members = {"__deepcopy__": deepcopy, "__module__": original.__module__, "__doc__": original.__doc__}
            module.__class__ = type(original.__name__, (original,), members)

    def end(self) -> None:
        """Notice no more: the model is about to be cut."""
        self._module.__class__ = self._original
        theirs = sys.modules.get("torch.optim.swa_utils")
        copies = [found for reference in self._made if (found := reference()) is not None]
        if copies and theirs is not None:
            kind = theirs.AveragedModel
            averages = [item for item in gc.get_objects() if type(item) is kind]
            self._averages = [weakref.ref(item) for item in averages if any(item.module is found for found in copies)]

    def accept_used(self) -> None:
        """Take note that averages were right to take values up to now: the model was whole, and paired with them."""
        found = ((reference, reference()) for reference in self._averages)
        self._accepted = {reference: int(average.n_averaged) for reference, average in found if average is not None}

    def refuse_used(self) -> None:
        """Refuse an average that has taken values of the model since it was cut, but where the model was whole.

        Raises:
            ApplyError: It has.
        """
        for reference in self._averages:
            average = reference()
            if average is not None and int(average.n_averaged) > self._accepted.get(reference, 0):
                raise ApplyError(
                    "an AveragedModel was made of the model before its first step, while the rank had all of it, and averages "
                    "now what this rank holds: its parameters are paired with the wrong ones",
                    fix="update it inside model.whole_parameters(), or make it after the first step, or pass example_batch= to "
                    "apply_plan",
                )
