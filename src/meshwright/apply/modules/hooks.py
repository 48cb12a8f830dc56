"""Hooks on the user's module that stay behind where the module is copied or pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__: list[str] = []


class OwnHook:
    """A hook of ours. A copy of the module gets one that does nothing, since the copy is a plain module without a plan.

    Args:
        run: The hook.
        on_copy: Called, where the module is copied, with the copies so far by id; it may refuse.
        only_looks: Whether it touches no tensor and runs no code of the user's; who follows a forward may pass it over.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        on_copy: Callable[[Mapping[int, Any]], None] | None = None,
        *,
        only_looks: bool = False,
    ) -> None:
        self.only_looks = only_looks
        self._run = run
        self._on_copy = on_copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> OwnHook:
        if self._on_copy is not None:
            self._on_copy(memo)
        return OwnHook(do_nothing)

    def __reduce__(self) -> Any:
        if self._on_copy is not None:
            self._on_copy({})
        return OwnHook, (do_nothing,)


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing around a module's call."""
