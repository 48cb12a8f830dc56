"""Autocast of forwards and losses: the plan's dtype, or that of the `torch.autocast` around a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.errors import ApplyError, MeshwrightError, UserCodeError

__all__: list[str] = []


class Autocast:
    """Casts where a plain loop would: in forward and loss only.

    Args:
        kind: The type of device that the model runs on.
        planned: The plan's dtype; None for the model's own.
    """

    def __init__(self, kind: str, planned: torch.dtype | None) -> None:
        self._kind = kind
        self._planned = planned
        self.dtype = planned
        """What forwards run in now; None for the model's own."""

    @contextlib.contextmanager
    def taken_in(self) -> Iterator[None]:
        """Disable the surrounding autocast inside the context, and apply it to the forwards there.

        Raises:
            ApplyError: Its dtype is not the plan's.
        """
        if not torch.is_autocast_enabled(self._kind):
            yield
            return
        found = torch.get_autocast_dtype(self._kind)
        if self._planned not in (None, found):
            raise ApplyError(
                f"the plan's precision casts forwards to {self._planned}, and this is called under torch.autocast to {found}",
                fix="leave one of them out: torch.autocast around the step, or precision= of the plan",
            )
        self.dtype = found
        try:
            # Under an autocast around it all, torch would keep weights as they were cast before an update, or a cut.
            with torch.autocast(self._kind, enabled=False), _counted_from_zero():
                yield
        finally:
            self.dtype = self._planned

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Name autocast where code of the model's fails inside the context, in which forwards are run without it.

        Raises:
            ApplyError: The code's error, where steps are under autocast.
        """
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, MeshwrightError) and not isinstance(error, UserCodeError)
            if self.dtype is None or is_ours:
                raise
            told = next(iter(str(error).splitlines()), "")
            raise ApplyError(
                "the plan looks at the model's forward without autocast before it cuts layers, and there it raised "
                f"{type(error).__name__}: {told}",
                fix=f"let the forward run without autocast to {self.dtype}, too, or use a plan of dp and zero",
            ) from error

    def in_forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward and loss; it also applies to threads outside the user's autocast."""
        if self.dtype is None and not torch.is_autocast_enabled(self._kind):
            return contextlib.nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype, enabled=self.dtype is not None)


@contextlib.contextmanager
def _counted_from_zero() -> Iterator[None]:
    """Have autocasts inside forget the weights that they have cast, which torch does when the outermost one ends."""
    depth = 1
    while torch.autocast_decrement_nesting() > 0:  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        depth += 1
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
