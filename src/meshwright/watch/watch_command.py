"""The command `meshwright watch`: looks at a run's folder again and again, in the terminal or for a browser."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live

from meshwright.watch.follow import RunFollower, WatchedRun
from meshwright.watch.screen import view

__all__: list[str] = []


def watch_in_terminal(folder: Path, *, every_s: float = 1.0, once: bool = False) -> None:
    """Show a run until it is over, or once where the output is not a terminal. Ctrl-C leaves; the run goes on.

    Args:
        folder: The run's folder.
        every_s: Between two looks [s].
        once: Look once.

    Raises:
        ConfigError: It is not a run's folder.
        StorageError: It cannot be read.
    """
    follower = RunFollower(folder)
    console = Console(file=sys.stdout, highlight=False)
    ascii_only = console.options.ascii_only

    def look() -> tuple[WatchedRun, RenderableType]:
        watched = follower.look()
        height = max(6, min(16, console.height - 16))
        return watched, view(watched, width=console.width, height=height, ascii_only=ascii_only)

    watched, shown = look()
    if once or not console.is_terminal:
        console.print(shown)
        return
    pause = threading.Event()
    try:
        with _ended_by_signals(), Live(shown, console=console, auto_refresh=False) as live:
            while not watched.is_over:
                pause.wait(every_s)
                watched, shown = look()
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave as after Ctrl-C where the process is asked to end: the terminal gets its cursor back."""

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the handler's signature
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_in_browser(folder: Path, port: int) -> None:
    """Serve the live report to this machine's browsers until Ctrl-C.

    Args:
        folder: The run's folder.
        port: The port; 0 takes a free one.

    Raises:
        ConfigError: The port is taken, or it is not a run's folder.
    """
    from meshwright.watch.serve import LiveServer

    with LiveServer(folder, port) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.write("this machine alone, with the token in that address; Ctrl-C ends it, the run goes on\n")
        sys.stdout.flush()
        server.serve()
