"""Errors by which ranks tell of another rank's, and the errors after which nothing can be told any more."""

from __future__ import annotations

from meshwright import errors
from meshwright.comm.peer_calls import PeerCalls
from meshwright.errors import LostPeerError, MeshwrightError, UserCodeError

__all__: list[str] = []


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class; of the class of `meshwright.errors` that it is one of, where it is."""
    ours = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return next(ours, type(error).__name__)


def error_of_rank(rank: int, kind: str, message: str, fix: str | None) -> MeshwrightError:
    """Return the error for another rank's: of its class where that is ours, else a UserCodeError, with its exit code.

    Args:
        rank: The rank that raised.
        kind: Its error's class, as `kind_of` gives it.
        message: Its error's text.
        fix: What helps; None points to that rank.

    >>> error_of_rank(1, "ApplyError", "no", None).exit_code, error_of_rank(1, "ValueError", "no", None).exit_code
    (2, 10)
    """
    found = getattr(errors, kind, None)
    ours = found if isinstance(found, type) and issubclass(found, MeshwrightError) else None
    text = f"rank {rank} cannot go on: {message if ours else f'{kind}: {message}'}"
    error = (ours or UserCodeError)(text, rank=rank, fix=fix or f"see the exception of rank {rank}")
    error.is_told = True
    return error


def ends_exchanges(error: BaseException, calls: PeerCalls | None) -> bool:
    """Tell whether a rank cannot be told of this error: one is lost, or has raised and left the call.

    Args:
        error: What this rank's code raised.
        calls: The calls that ranks make together.
    """
    return isinstance(error, LostPeerError) or (calls is not None and calls.has_given_up)
