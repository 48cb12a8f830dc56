"""The command `meshwright watch`: looks at a run's folder again and again, in the terminal or for a browser."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.live import Live

from meshwright.watch.follow import RunFollower
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
    watched = follower.look()
    if once or not console.is_terminal:
        console.print(view(watched, width=console.width))
        return
    pause = threading.Event()
    try:
        with Live(view(watched, width=console.width), console=console, auto_refresh=False) as live:
            while not watched.is_over:
                pause.wait(every_s)
                watched = follower.look()
                height = max(6, min(16, console.height - 16))
                live.update(view(watched, width=console.width, height=height), refresh=True)
    except KeyboardInterrupt:
        return


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
