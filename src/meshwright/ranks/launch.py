"""Functions run on several ranks of this host: `launch` for one call, `RankGroup` for several calls on the same ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from meshwright.comm.shm.build import BuildError, build_extension
from meshwright.errors import ConfigError, rank_of
from meshwright.host import usable_cores
from meshwright.ranks import reaper
from meshwright.ranks.capacity import check_launch, explain_limit
from meshwright.ranks.environment import choose_transport
from meshwright.ranks.heartbeat import Beat
from meshwright.ranks.supervisor import Supervisor

__all__: list[str] = []

QUICK_STOP_S: Final = 0.5
"""How long ranks that have nothing to save may take to end after a signal [s]."""


class RankGroup:
    """Ranks of this host that stay for several calls.

    Args:
        num_devices: Number of ranks, one per device [count].
        threads_per_rank: Threads that each rank computes with [count]; None is OMP_NUM_THREADS where that is set, else
            an equal share of the cores that this process may use.
        timeout_s: How long a rank may wait in one collective before the group is taken for hung [s].
        on_event: Called in this process as ``on_event(rank, event)`` for every `World.emit`, in order per rank.
        env: Environment variables for the ranks, beside this process's.
        start_timeout_s: How long the ranks may take to find each other [s].
        stop_grace_s: How long the ranks may take to end after a signal asked them to stop [s].
        on_beats: As for `launch`.

    Raises:
        ConfigError: `num_devices` is not positive, or more than this host or its limits have room for; or this process is itself
            a rank.
        LostPeerError: The ranks did not start in time.
        WorkerKilledError: A rank was killed while it started.

    Example:
        >>> with RankGroup(2) as group:  # doctest: +SKIP
        ...     group.submit(math.sqrt, 4.0)
        [2.0, 2.0]
    """

    def __init__(
        self,
        num_devices: int,
        *,
        threads_per_rank: int | None = None,
        timeout_s: float = 300.0,
        on_event: Callable[[int, dict[str, Any]], None] | None = None,
        env: dict[str, str] | None = None,
        start_timeout_s: float = 60.0,
        stop_grace_s: float = 30.0,
        on_beats: Callable[[list[Beat], list[int], float], None] | None = None,
    ) -> None:
        _check_request(num_devices, threads_per_rank)
        check_launch(num_devices)
        _prepare_transport(num_devices, env)
        self.num_devices = num_devices
        try:
            self._supervisor = Supervisor(
                num_devices,
                threads=_threads(num_devices, threads_per_rank, env),
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
                stop_grace_s=stop_grace_s,
                env=env,
                on_event=on_event,
            )
            self._supervisor.on_beats = on_beats
            # For a group that was not closed: at its collection, or at the interpreter's end.
            self._finalizer = weakref.finalize(self, self._supervisor.kill)
            self._supervisor.start()
        except OSError as error:
            if rank_of(error) is None and (explained := explain_limit(error, num_devices)) is not None:
                raise explained from error
            raise

    def submit(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results in rank order.

        Args:
            fn: An importable function; one of the script that is being run will do, if that has a main guard.
            *args: Its arguments, which are pickled once for all ranks.

        Returns:
            What each rank returned.

        Raises:
            ConfigError: The function or its arguments cannot be handed to another process.
            Exception: The guilty rank's own exception; a note on it has the rank and the traceback there.
            UserCodeError: The guilty rank's exception, where that could not be rebuilt in this process.
            WorkerKilledError: A rank was killed, or left before its work was done.
            LostPeerError: The ranks hang.
            StoppedOnRequest: The ranks stopped because a signal asked them to, before they were done.
            KeyboardInterrupt: SIGINT came a second time.
        """
        payload, main = _pack_call(fn, args)
        return self._supervisor.call(payload, main)

    @property
    def is_closed(self) -> bool:
        """Whether the ranks are gone: after `close`, and after any error."""
        return self._supervisor.is_closed

    @property
    def run_id(self) -> str:
        """The random id that every process of this group carries in its environment, as MESHWRIGHT_RUN_ID."""
        return self._supervisor.run_id

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return self._supervisor.pids

    def close(self) -> None:
        """Let the ranks leave, and make sure that nothing of them is left."""
        self._supervisor.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._supervisor.kill()


def _prepare_transport(num_devices: int, env: dict[str, str] | None) -> None:
    """Compile the shared-memory transport before the ranks' start timeout begins; ranks report why where that fails."""
    if num_devices > 1 and choose_transport({**os.environ, **(env or {})}) == "shm":
        with contextlib.suppress(BuildError):
            build_extension()


def launch(
    fn: Callable[..., Any],
    num_devices: int,
    *args: Any,
    threads_per_rank: int | None = None,
    timeout_s: float = 300.0,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
    env: dict[str, str] | None = None,
    start_timeout_s: float = 60.0,
    stop_grace_s: float = 30.0,
    on_beats: Callable[[list[Beat], list[int], float], None] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on that many ranks of this host and return the results in rank order. Nothing is left behind.

    SIGINT, SIGTERM and SIGHUP ask all ranks to stop (`World.stop_requested`); a second SIGINT kills them.

    Args:
        fn: An importable function; one of the script that is being run will do, if that has a main guard. In a notebook or at a
            prompt, one that is defined there, with `meshwright[notebook]`: it is copied with what it uses.
        num_devices: Number of ranks, one per device [count].
        *args: The function's arguments.
        threads_per_rank: Threads that each rank computes with [count]; None is an equal share of the cores.
        timeout_s: How long a rank may wait in one collective before the group is taken for hung [s].
        on_event: Called in this process as ``on_event(rank, event)`` for every `World.emit`, in order per rank.
        env: Environment variables for the ranks, beside this process's.
        start_timeout_s: How long the ranks may take to find each other [s].
        stop_grace_s: How long the ranks may take to end after a signal asked them to stop [s].
        on_beats: Called in this process several times a second with what each rank is doing, their processes, and the wait
            that would be longer than their steps explain [s].

    Returns:
        What each rank returned.

    Raises:
        ConfigError: The request makes no sense, or this process is itself a rank.
        Exception: As `RankGroup.submit`.

    Example:
        >>> launch(math.sqrt, 2, 4.0)  # doctest: +SKIP
        [2.0, 2.0]
    """
    with RankGroup(
        num_devices,
        threads_per_rank=threads_per_rank,
        timeout_s=timeout_s,
        on_event=on_event,
        env=env,
        start_timeout_s=start_timeout_s,
        stop_grace_s=stop_grace_s,
        on_beats=on_beats,
    ) as group:
        return group.submit(fn, *args)


def _check_request(num_devices: int, threads_per_rank: int | None) -> None:
    if num_devices < 1:
        raise ConfigError(f"{num_devices} ranks cannot be started; the least is 1")
    if threads_per_rank is not None and threads_per_rank < 1:
        raise ConfigError(f"threads_per_rank is {threads_per_rank}; the least is 1")
    if reaper.RUN_ID_VARIABLE in os.environ:
        raise ConfigError(
            "ranks cannot start ranks: this process was itself started by a launch",
            fix='put the call under `if __name__ == "__main__":`, or call it outside the launched function',
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and each of them would launch {num_devices} of its own",
            fix="call the function itself under torchrun: its ranks join there; or start the script with python",
        )


def _threads(num_devices: int, threads_per_rank: int | None, env: dict[str, str] | None) -> int | None:
    """Return the threads per rank; None where OMP_NUM_THREADS already says it."""
    if threads_per_rank is not None:
        return threads_per_rank
    if "OMP_NUM_THREADS" in (env or {}) or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, usable_cores() // num_devices)


def _pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, str | None]:
    """Return the pickled call, and the path or module of the main script if the call refers to it."""
    if _is_interactive() and (by_value := _pickler_by_value()) is not None:
        return _pack_by_value(by_value, fn, args), None
    try:
        payload = pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ConfigError(
            f"{name} and its arguments cannot be handed to another process: {error}",
            fix="use a function at the top level of a module, and arguments that can be pickled",
        ) from error
    return payload, _main_script() if b"__main__" in payload or b"__mp_main__" in payload else None


def _is_interactive() -> bool:
    """Tell whether the main program is a notebook or a prompt, which other processes cannot import."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path))


def _pickler_by_value() -> Callable[[Any], bytes] | None:
    """Return what pickles functions and classes of a notebook with their code; None where the package is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle.dumps


def _pack_by_value(dumps: Callable[[Any], bytes], fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return dumps((fn, args))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ConfigError(
            f"{name}, what it uses and its arguments cannot be handed to another process: {error}",
            fix="let it make what cannot be copied (files, locks, connections, GPU tensors) inside of itself",
        ) from error


def _main_script() -> str:
    """Return "module:NAME" for a script run with ``python -m``, else "path:FILE"."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"module:{spec.name}"
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):
        raise ConfigError(
            "the function stands in an interactive session, which other processes cannot import",
            fix="pip install 'meshwright[notebook]', or write it into a module (a .py file) and import it from there",
        )
    return f"path:{os.path.abspath(path)}"
