"""Guard of state dicts, copies and pickles: a rank's parts of parameters are never given out, or taken in, as whole values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from meshwright.apply.engine import Engine
from meshwright.apply.modules.hooks import OwnHook
from meshwright.errors import ApplyError

__all__: list[str] = []

_log = logging.getLogger(__name__)


class StateGuard:
    """Refuses `state_dict`, `load_state_dict` and copies of a module, or of a submodule, while this rank holds parts.

    Args:
        engine: The engine, which knows this rank's parts.
        plan: The plan, for the errors.
    """

    def __init__(self, engine: Engine, plan: str) -> None:
        self._engine = engine
        self._plan = plan
        self._depth = 0
        self._hooks: list[Any] = []
        for child in engine.module.modules():
            on_copy = self._refuse_copy if child is engine.module else None
            self._hooks.append(child.register_state_dict_pre_hook(OwnHook(self._refuse_state_dict, on_copy)))
            self._hooks.append(child.register_load_state_dict_pre_hook(OwnHook(self._refuse_load)))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Allow reads inside the context: values are whole there."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _has_parts(self) -> bool:
        return not self._depth and self._engine.holds_parts

    def _refuse_state_dict(self, module: nn.Module, *_: Any) -> None:
        if self._has_parts():
            raise ApplyError(
                f"state_dict() of {_name(module)} would not be the model's: under the plan '{self._plan}' a rank has only its "
                "shards",
                fix="call full_state_dict() of the model that apply_plan returned, on every rank; or enter "
                "`with model.whole_parameters():` on every rank",
            )

    def _refuse_load(self, module: nn.Module, *_: Any) -> None:
        if self._has_parts():
            raise ApplyError(
                f"load_state_dict() of {_name(module)} cannot be taken over: under the plan '{self._plan}' a rank has its "
                "shards alone",
                fix="load the state into the module before apply_plan, or inside `with model.whole_parameters():` on every rank",
            )

    def _refuse_copy(self, copied: Mapping[int, Any]) -> None:
        # An engine that runs a copy of the model installs its own tensors there before anything is copied.
        is_ours = all(id(parameter) in copied for parameter in self._engine.module.parameters())
        if not self._engine.is_prepared and not is_ours:
            _log.warning(
                "the module was copied before the plan '%s' has laid it out: the copy is whole, and after the first batch the "
                "module holds this rank's part; update an average of it inside `with model.whole_parameters():`",
                self._plan,
            )
        if self._has_parts():
            raise ApplyError(
                f"a copy of the module would be of a part of it: under the plan '{self._plan}' a rank has only its shards",
                fix="copy or average it inside `with model.whole_parameters():`, which every rank enters",
            )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _name(module: nn.Module) -> str:
    return f"a {type(module).__name__}"
