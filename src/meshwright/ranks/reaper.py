"""Reaper: kills every process of a run. As a program it waits beside the launching process and does so when that one dies.

The program holds the reading end of a pipe whose writing end only the launching process has. When that process ends without a
farewell, even by SIGKILL, the pipe ends. The reaper then kills every process that carries the run's id: ranks, and processes
that ranks have started, which no parent-death signal reaches. It imports almost nothing, so that it starts in milliseconds and
takes a few megabytes.

    python -I -S reaper.py RUN_ID [DIRECTORY]
"""

import os
import signal
import sys
import time

RUN_ID_VARIABLE = "MESHWRIGHT_RUN_ID"
FAREWELL = "farewell"


def find(run_id, sessions):  # noqa: ANN001, ANN201 - this file stays free of imports, typing's included
    """Return the ids of the processes that carry the run's id in their environment, or belong to one of the sessions."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    own = os.getpid()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
            if fields[0] in (b"Z", b"X"):
                continue
            if int(fields[3]) in sessions:
                found.append(int(name))
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except (OSError, IndexError, ValueError):
            continue  # it has ended, or this user may not read it
    return found


def sweep(run_id, sessions, patience_s=2.0, spared=()):  # noqa: ANN001, ANN201
    """Kill every process of a run, until none is left or the time is over.

    Args:
        run_id: The run's id, as the processes carry it in their environment.
        sessions: Session ids that belong to the run: the ranks' process ids.
        patience_s: How long to look [s]; a process in an uninterruptible wait dies only when that ends.
        spared: Ids of processes of the run to leave alive: one that still has to reap the others.

    Returns:
        The ids of the processes that did not die.
    """
    for session in sessions:
        try:
            os.killpg(session, signal.SIGKILL)
        except (OSError, OverflowError):
            continue
    deadline = time.monotonic() + patience_s
    left = [pid for pid in find(run_id, sessions) if pid not in spared]
    while left and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.005)
        left = [pid for pid in find(run_id, sessions) if pid not in spared]
    return left


def _remove(directory):  # noqa: ANN001, ANN202
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    os.rmdir(directory)


def main():  # noqa: ANN201
    """Wait for the end of the standard input; without a farewell, end the run."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sessions = set()
    for line in sys.stdin:
        word = line.strip()
        if word == FAREWELL:
            return
        if word:
            sessions.add(int(word))
    sweep(sys.argv[1], sessions, 10.0)
    if len(sys.argv) > 2:
        _remove(sys.argv[2])


if __name__ == "__main__":
    main()
