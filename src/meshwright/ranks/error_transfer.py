"""Transfer of an exception from a rank to the launching process: described there, rebuilt here."""

from __future__ import annotations

import io
import pickle
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from meshwright.comm.shm.transport_errors import DisagreementError
from meshwright.errors import MeshwrightError, RankNote, UserCodeError

__all__: list[str] = []

PACKAGE: Final = __name__.partition(".")[0]
WORKER_FILE = str(Path(__file__).with_name("worker.py"))
"""The file whose frames stand above the user's function in every rank; nobody wants to read them."""


def describe_error(error: BaseException, shown: BaseException | None = None) -> dict[str, Any]:
    """Return what the launching process needs to raise this exception again.

    Args:
        error: The exception.
        shown: The exception whose traceback is shown, if that is another.

    `secondary` tells that another rank is the only cause: it is lost, or has told of an error of its own. If an earlier exception
    of this rank's own led to the lost peer (a collective in a `finally`), that earlier one is described.
    """
    from meshwright.comm.communicator import is_lost_peer

    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)

    def is_consequence(link: BaseException) -> bool:
        # A rank that fails runs into a collective that its peers are not in, where it cleans up (a barrier in a `finally`).
        return is_lost_peer(link) or isinstance(link, DisagreementError)

    secondary = is_consequence(chain[-1]) or getattr(error, "is_told", False)
    if not secondary and is_consequence(error):
        error = next(link for link in chain if not is_consequence(link))
    text = _safe_text(error)
    shown = error if shown is None else shown
    return {
        "type": type(error).__qualname__,
        "text": text,
        "traceback": "".join(traceback.format_exception(type(shown), shown, users_part(shown))).rstrip(),
        "pickled": _pickled(error),
        "secondary": secondary,
        "at": time.monotonic(),
    }


def early_end(error: BaseException, rank: int, world_size: int) -> UserCodeError:
    """Return the error of a rank whose code raises SystemExit or KeyboardInterrupt, which end a script, and here its work.

    Args:
        error: What was raised.
        rank: The rank.
        world_size: Number of ranks [count].
    """
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised KeyboardInterrupt"
    return UserCodeError(
        f"rank {rank} of {world_size} {what} before its work was done",
        rank=rank,
        traceback_text="".join(traceback.format_exception(type(error), error, users_part(error))),
    )


def users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that is not the worker's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == WORKER_FILE:
        trace = trace.tb_next
    return trace


def _safe_text(error: BaseException) -> str:
    try:
        return "".join((str(error), ""))  # of a subclass of str it makes a str: what crosses is plain data
    except Exception as broken:  # noqa: BLE001 - the class's own code
        return f"(its text cannot be made: {type(broken).__name__})"


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # noqa: BLE001 - the class's own code
        return None


class _LoadedReader(pickle.Unpickler):
    """Reads objects of modules that this process has loaded, and of this package: nothing else is imported for an error.

    To import torch, or what a user's model needs, would take seconds, while nobody watches the ranks.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name not in sys.modules and not (module_name == PACKAGE or module_name.startswith(f"{PACKAGE}.")):
            raise pickle.UnpicklingError(f"{module_name} is not loaded here")
        return super().find_class(module_name, global_name)


def rebuild_error(info: dict[str, Any], rank: int, world_size: int) -> BaseException:
    """Return a rank's exception: the object itself if it survives the transfer and its class is loaded here, else a
    `UserCodeError`.

    Args:
        info: The rank's description, see `describe_error`.
        rank: The rank that raised.
        world_size: Number of ranks [count].
    """
    traceback_text = info["traceback"]
    error = _unpickled(info)
    if error is None:
        raised = f"{info['type']}: {info['text']}" if info["text"] else info["type"]
        text = f"rank {rank} of {world_size} raised {info['type']}: {info['text']}\n\n{traceback_text}"
        return UserCodeError(text, rank=rank, traceback_text=traceback_text, raised=raised)
    error.add_note(RankNote(f"rank {rank} of {world_size}; its traceback:\n{traceback_text}", rank))
    if isinstance(error, MeshwrightError) and error.rank is None:
        error.rank = rank
    return error


def _unpickled(info: dict[str, Any]) -> Exception | None:
    if info["pickled"] is None:
        return None
    try:
        error = _LoadedReader(io.BytesIO(info["pickled"])).load()
        same = isinstance(error, Exception) and str(error) == info["text"]
    except Exception:  # noqa: BLE001 - rebuilding runs the class's own code, which may raise anything
        return None
    return error if same else None
