"""Texts of torch's own errors, where it has no type of exception: the only file that reads an error's text.

It does not import torch.

A release of torch may reword these, so each is used where a wrong answer costs a clear message and never a number.
"""

from __future__ import annotations

__all__: list[str] = []

# Of gloo, NCCL and the store: the other side is gone or late.
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "timed out waiting",
    "timed out after",
    "application timeout caused pair closure",  # gloo, of exchanges that another one's timeout has ended
    "wait timeout",
    "broken pipe",
    "read error",
    "write error",
    "remote process exited",
    "nccl communicator was aborted",
    "connection was likely closed",
    "failed to recv",
    "socket closed",
    "when running the callback: peergoneerror",  # of an exception in a future's callback torch keeps the class's name alone
)
_NOT_YET = "Operation timed out!"
_INTO_EXPANDED = "more than one element of the written-to tensor"
_NOT_RESIZABLE = "resize storage that is not resizable"
_NO_SAVED_HOOKS = "don't yet support saved tensor hooks"
_NOT_ASSIGNED = "annot assign "
_AS_PARAMETER = ("non-leaf Tensor", "as parameter")


def says_peer_gone(error: RuntimeError) -> bool:
    """Tell whether torch says that another rank is gone or late: all of it are plain RuntimeErrors."""
    text = str(error).lower()
    return any(part in text for part in _PEER_GONE)


def os_error_in(error: Exception) -> int | None:
    """Return the system's number of an error that safetensors tells as text alone, "(os error 28)"; None where there is none."""
    number = str(error).partition("os error ")[2].partition(")")[0]
    return int(number) if number.isdigit() else None


def says_not_yet(error: RuntimeError) -> bool:
    """Tell whether gloo's `wait` for a time says that the exchange goes on."""
    return _NOT_YET in str(error)


def says_written_into_expanded(error: RuntimeError) -> bool:
    """Tell whether code wrote into a tensor whose entries share memory, as the stand-in of a sharded parameter has them."""
    return _INTO_EXPANDED in str(error)


def says_not_resizable(error: RuntimeError) -> bool:
    """Tell whether torch cannot make a tensor's memory larger, since it did not come from torch's own allocator."""
    return _NOT_RESIZABLE in str(error)


def says_no_saved_hooks(error: RuntimeError) -> bool:
    """Tell whether a transform of torch.func refuses to run inside of a checkpoint."""
    return _NO_SAVED_HOOKS in str(error)


def says_not_assigned(error: Exception) -> bool:
    """Tell whether nn.Module refused what was given in place of a parameter; a child module or a buffer is another matter."""
    if not isinstance(error, (ValueError, TypeError)):
        return False
    _, begin, rest = str(error).partition(_NOT_ASSIGNED)
    return bool(begin) and any(word in rest for word in _AS_PARAMETER)
