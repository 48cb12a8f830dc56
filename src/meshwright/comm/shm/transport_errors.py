"""Exceptions of exchanges over shared memory: classes, so that nobody reads a message. All are RuntimeErrors, like torch's."""

from __future__ import annotations

__all__: list[str] = []


class TransportError(RuntimeError):
    """An exchange over shared memory has failed."""


class PeerGoneError(TransportError):
    """Another rank is gone, late, has raised, or this one has left the group.

    Args:
        text: What is shown.
        group_rank: The rank of the group that it is about; -1 where that is not known, or not one.
    """

    def __init__(self, text: str, group_rank: int = -1) -> None:
        super().__init__(text)
        self.group_rank = group_rank

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[str, int]]:
        return type(self), (str(self), self.group_rank)


class DisagreementError(TransportError):
    """The ranks are in different collectives, or in one with different sizes. All of them raise."""


class WrongLengthError(TransportError):
    """What came under a tag has not the length of the tensor that was to receive it.

    Args:
        text: What is shown.
        sent_bytes: Length of what came [bytes].
    """

    def __init__(self, text: str, sent_bytes: int) -> None:
        super().__init__(text)
        self.sent_bytes = sent_bytes

    def __reduce__(self) -> tuple[type[WrongLengthError], tuple[str, int]]:
        return type(self), (str(self), self.sent_bytes)
