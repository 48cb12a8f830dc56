"""State of the code between layers, on a rank with several stages: each of them walks the whole forward, and has its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class OwnState:
    """Buffers and plain attributes of the modules around the layers, once for each stage of a rank.

    A counter that the model's forward raises would be raised once for each stage otherwise.

    Args:
        modules: The modules whose forward every stage runs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._kept: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._current: int | None = None
        self._left: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._versions: list[tuple[int, int]] = []

    def begin_step(self) -> None:
        """Forget the stages' own state where somebody else has changed what the last one left."""
        if self._left is not None and self._is_changed():
            self._kept.clear()
        self._left = None

    def end_step(self) -> None:
        """Take note of what is left."""
        self._left = self._read()
        self._versions = self._read_versions()

    def _is_changed(self) -> bool:
        now = self._read()
        for (attributes, buffers), (old_attributes, old_buffers) in zip(now, self._left or [], strict=True):
            for new, old in ((attributes, old_attributes), (buffers, old_buffers)):
                if new.keys() != old.keys() or any(new[key] is not old[key] for key in new):
                    return True
        return self._versions != self._read_versions()

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for module in self._modules for b in module._buffers.values() if b is not None]

    def enter(self, stage: int) -> None:
        """Have the state of a stage in force; one that has none yet begins with a copy of what is there."""
        if self._current == stage and stage in self._kept:
            return
        if not self._kept:
            self._kept = {stage: self._read()}
            self._start = self._copied(self._kept[stage])
        else:
            if self._current is not None and self._current in self._kept:
                self._kept[self._current] = self._read()
            if stage not in self._kept:
                self._kept[stage] = self._copied(self._start)
            self._write(self._kept[stage])
        self._current = stage

    def _read(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [
            ({key: value for key, value in vars(module).items() if _is_state(key, value)}, dict(module._buffers))
            for module in self._modules
        ]

    def _write(self, state: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for module, (attributes, buffers) in zip(self._modules, state, strict=True):
            own = vars(module)
            for key in [key for key, value in own.items() if _is_state(key, value) and key not in attributes]:
                del own[key]
            own.update(attributes)
            module._buffers.update(buffers)

    @staticmethod
    def _copied(state: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [
            (
                {key: _copy(value) for key, value in attributes.items()},
                {key: None if b is None else _copy_tensor(b) for key, b in buffers.items()},
            )
            for attributes, buffers in state
        ]


def _is_state(key: str, value: Any) -> bool:
    return key not in _OF_TORCH and not isinstance(value, (nn.Module, nn.Parameter)) and key != "training"


def _copy(value: Any) -> Any:
    if type(value) in (list, dict, set, deque):
        return value.copy()
    return _copy_tensor(value) if isinstance(value, Tensor) and value.is_leaf else value


def _copy_tensor(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()
