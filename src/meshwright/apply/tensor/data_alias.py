"""Memory that `.data` of a tensor in slices returns, and that autograd does not watch."""

from __future__ import annotations

from torch import Tensor

from meshwright.errors import ApplyError

__all__: list[str] = []


class DataAlias:
    """The result of `.data` of a tensor in slices: memory of the whole that autograd does not watch.

    On one device a write into it changes what earlier layers saved for backward. Here they saved slices, which do not change.
    """

    def __init__(self, data: Tensor, *, is_used: bool) -> None:
        self._data = data
        self._used_at = data._version if is_used else None
        self._is_written = False

    def is_used(self) -> None:
        """Record a use of the whole tensor with its present values."""
        version = self._data._version
        self._is_written = self._is_written or self._used_at not in (None, version)
        self._used_at = version

    def refuse_writes(self, _: Tensor) -> None:
        """Raise ApplyError if it was written into after a use of the whole tensor; called in backward."""
        if self._is_written or self._used_at not in (None, self._data._version):
            raise ApplyError(
                "the .data of a tensor that lies in slices was written into after the tensor had been used, and that use keeps "
                "the earlier values for backward",
                fix="write into .data before the tensor is used, or into a clone",
            )
