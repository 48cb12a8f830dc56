"""State of the code between layers, one copy for each stage of a rank: each of them runs the whole forward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.apply.pipeline.walking.stage_hooks import StageHooks
from meshwright.apply.pipeline.walking.stand_ins import StageValue, StandIn, mark, value_of
from meshwright.apply.state.attributes import OF_TORCH

__all__: list[str] = []

_CONTAINERS = (list, dict, set, deque)


@dataclasses.dataclass(slots=True)
class _StageState:
    """One stage's state of one module: attributes and buffers, by name."""

    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]

    def copied(self) -> _StageState:
        return _StageState(
            {key: _copy(value) for key, value in self.attributes.items()},
            {key: None if b is None else _copy_tensor(b) for key, b in self.buffers.items()},
        )


class OwnState:
    """Buffers and plain attributes of the modules outside units, and hooks, one copy for each stage of a rank.

    Without it a counter in the model's forward would count once for each stage. Between steps each module shows the buffer of the
    stage that computes it; a change made from outside then applies to all stages.

    Args:
        module: The model.
        modules: Its modules outside units.
        stages: The rank's stages.
    """

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module], stages: Iterable[int]) -> None:
        self._hooks = StageHooks(module)
        self._modules = modules
        self._stages = tuple(stages)
        self._kept: dict[int, list[_StageState]] = {}
        self._current: int | None = None
        self._left: list[tuple[_StageState, dict[str, Any]]] | None = None

    def begin_step(self) -> None:
        """Give all stages the changes made from outside since the last step."""
        if self._left is not None:
            for module, (state, marks), *kept in zip(self._modules, self._left, *self._kept.values(), strict=True):
                self._take_over(_read(module), state, marks, kept)
        self._left = None

    def end_step(self) -> None:
        """Install the buffers of the stages that compute them, and record them to notice later changes."""
        self._hooks.leave()
        if self._current is not None:
            self._kept[self._current] = [_read(module) for module in self._modules]
            self._current = None
        for place, module in enumerate(self._modules):
            for key in list(module._buffers):
                module._buffers[key] = self._of_home(place, key, module._buffers[key])
        if self._kept:
            self._left = [(state, _marks(state)) for state in map(_read, self._modules)]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run forwards inside the context on copies of all stages' state, however they end.

        The state that the modules show is not restored: whoever tries a forward restores it in any case.
        """
        found, hooks = (self._kept, self._current, self._left), self._hooks.copied()
        self._kept = {stage: [state.copied() for state in states] for stage, states in self._kept.items()}
        if self._current is not None:  # a step has ended in an error, and the modules show what that stage has
            self._kept[self._current] = [_read(module).copied() for module in self._modules]
            self._current = None
        try:
            yield
        finally:
            self._kept, self._current, self._left = found
            self._hooks.put_back(hooks)

    def _of_home(self, place: int, key: str, present: Tensor | None) -> Tensor | None:
        """Return the buffer of the stage that computes it; another stage's where that one is not on this rank."""
        for stage, states in self._kept.items():
            buffer = states[place].buffers.get(key)
            value = None if buffer is None else value_of(buffer)
            if value is not None and value.home == stage:
                return buffer
        return present

    @staticmethod
    def _take_over(now: _StageState, left: _StageState, marks: dict[str, Any], kept: list[_StageState]) -> None:
        for state in kept:
            for key in left.attributes.keys() - now.attributes.keys():
                state.attributes.pop(key, None)
            for key, value in now.attributes.items():
                if _mark(value) != marks.get(key):
                    state.attributes[key] = _copy(value)
            for key, buffer in now.buffers.items():
                if _mark(buffer) != marks.get(key):
                    _replace(state.buffers, key, buffer)

    def enter(self, stage: int) -> None:
        """Install the state of a stage; one without a state begins with a copy of the current one."""
        if self._current is not None:
            self._hooks.leave()
        self._hooks.enter(stage)
        if self._current == stage:
            return
        if not self._kept:
            start = [_read(module) for module in self._modules]
            self._kept = {other: [state.copied() for state in start] for other in self._stages if other != stage}
            self._kept[stage] = start
        else:
            if self._current is not None:
                self._kept[self._current] = [_read(module) for module in self._modules]
            for module, state in zip(self._modules, self._kept[stage], strict=True):
                _write(module, state)
        self._current = stage


def _read(module: nn.Module) -> _StageState:
    return _StageState({k: v for k, v in vars(module).items() if _is_state(k, v)}, dict(module._buffers))


def _write(module: nn.Module, state: _StageState) -> None:
    own = vars(module)
    for key in [key for key, value in own.items() if _is_state(key, value) and key not in state.attributes]:
        del own[key]
    own.update(state.attributes)
    module._buffers.update(state.buffers)


def _marks(state: _StageState) -> dict[str, Any]:
    return {key: _mark(value) for key, value in (*state.attributes.items(), *state.buffers.items())}


def _mark(value: Any) -> Any:
    """Return a mark that differs after a change of a value, or of a container's contents.

    The mark holds the value, so that no later object gets its address.
    """
    if isinstance(value, Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if type(value) is dict:
        return _Same(value), tuple((_Same(key), _Same(item)) for key, item in value.items())
    return (_Same(value), tuple(map(_Same, value))) if type(value) in _CONTAINERS else _Same(value)


class _Same:
    """Compares equal only to a holder of the very same object."""

    __slots__ = ("_item",)

    def __init__(self, item: Any) -> None:
        self._item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._item is other._item

    def __hash__(self) -> int:
        return id(self._item)


def _is_state(key: str, value: Any) -> bool:
    return key not in OF_TORCH and not isinstance(value, (nn.Module, nn.Parameter)) and key != "training"


def _copy(value: Any) -> Any:
    if type(value) in _CONTAINERS:
        return value.copy()
    is_own = isinstance(value, Tensor) and not isinstance(value, StandIn) and value.is_leaf
    return _copy_tensor(value) if is_own else value


def _copy_tensor(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        copy = tensor.detach().clone()
    value = value_of(tensor)
    return copy if value is None or value.home is None else mark(copy, StageValue(value.owner, value.home, copy, None))


def _replace(buffers: dict[str, Tensor | None], key: str, new: Tensor | None) -> None:
    """Give a stage a buffer's new values; where another stage computes it, the tensor object, and what is known of it, stays."""
    old = buffers.get(key)
    if old is new:
        return
    is_alike = old is not None and new is not None and (old.shape, old.dtype) == (new.shape, new.dtype)
    if old is None or new is None or not is_alike or (value_of(new) is None) != (value_of(old) is None):
        buffers[key] = None if new is None else _copy_tensor(new)
        return
    with torch.no_grad():
        old.copy_(new)
