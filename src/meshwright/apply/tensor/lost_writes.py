"""Writes of a forward into parameters that are put together for one call, of which each rank keeps a part: they would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import without_function_modes
from meshwright.apply.state.assigned import names_data
from meshwright.errors import ApplyError
from meshwright.trees import memory_key

__all__: list[str] = []


class LostWrites:
    """What parameters that were put together for a call are like before it.

    Args:
        module: Whose call it is.
        values: FQN, from the module on -> what is in the parameter's place during the call.
        is_first: Whether it is the first call, whose writes through `.data` are found by value: torch does not count them.
            Those of later calls are looked for where code of the module names `data`.
    """

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor], *, is_first: bool) -> None:
        self._module = module
        with without_function_modes():
            parts = {name: _held(module, name) for name in values}  # None: a buffer, which is taken over as it is left
            self._values = {
                name: value for name, value in values.items() if parts[name] is not None and parts[name] is not value
            }
            self._marks = {name: _mark(value) for name, value in self._values.items()}
            looks = is_first or (bool(self._values) and names_data(module))
            self._before = {name: value.detach().clone() for name, value in self._values.items()} if looks else {}

    def refuse(self, scope: str) -> None:
        """Raise ApplyError where the call has written into one; called while they are in their places.

        Args:
            scope: The module's name in the model.
        """
        for name, value in self._values.items():
            is_written = _held(self._module, name) is not value or _mark(value) != self._marks[name]
            if is_written or (name in self._before and not _is_same(value, self._before[name])):
                _refuse_write(".".join(path for path in (scope, name) if path))


def _held(module: nn.Module, name: str) -> Any:
    path, _, own = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(own)


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    return (0 if tensor.is_inference() else tensor._version), tuple(tensor.shape), memory_key(tensor.detach())


def _is_same(value: Tensor, before: Tensor) -> bool:
    with torch.no_grad(), without_function_modes():
        return bool(((value == before) | before.isnan()).all())


def _refuse_write(name: str) -> None:
    raise ApplyError(
        f"the forward writes into '{name}', of which each rank keeps a part that is put together for the call alone: "
        "the write would be lost",
        fix=f"layouts={{'{name}': 'whole'}} in the plan",
    )
