"""Ranks as torchrun starts them, that take calls through pipes: nothing of ours is in the processes of the other libraries.

Our launcher would give them what it gives our ranks (it has the C library keep freed memory, for one), and they would be
measured with it. Run as a script this file is one such rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_EXIT_PATIENCE_S = 10.0


class PlainRanks:
    """Processes with torch's default group over gloo, or one process without a group. Ours join over their own transport.

    Args:
        num_ranks: How many [count].
        threads: Threads of each [count].
        timeout_s: How long one call, and one exchange, may take [s].
        env: Environment variables, beside this process's.
    """

    def __init__(self, num_ranks: int, *, threads: int, timeout_s: float, env: dict[str, str]) -> None:
        self.is_closed = False
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Connection] = []
        port = _free_port()
        for rank in range(num_ranks):
            mine, theirs = Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
            environment = os.environ | {name: str(value) for name, value in place.items()} | env
            command = [sys.executable, __file__, str(theirs.fileno()), str(timeout_s)]
            process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            theirs.close()
            self._processes.append(process)
            self._ends.append(mine)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run the function on every rank and return the results in rank order; any failure ends all ranks."""
        deadline = time.monotonic() + self._timeout_s
        results: dict[int, Any] = {}
        try:
            for end in self._ends:
                end.send((function, arguments))
            while len(results) < len(self._ends):
                missing = [end for rank, end in enumerate(self._ends) if rank not in results]
                ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"{function.__name__} did not end within {self._timeout_s:g} s")
                for end in ready:
                    rank = self._ends.index(end)
                    results[rank] = self._take(rank)
        except BaseException:
            self.kill()
            raise
        return [results[rank] for rank in range(len(self._ends))]

    def _take(self, rank: int) -> Any:
        try:
            is_well, result = self._ends[rank].recv()
        except (EOFError, OSError):
            raise RuntimeError(f"rank {rank} of {len(self._ends)} has ended") from None
        if not is_well:
            raise RuntimeError(f"rank {rank} of {len(self._ends)} failed:\n{result}")
        return result

    def close(self) -> None:
        """Let the ranks leave by themselves, then end those that have not."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(None)
        deadline = time.monotonic() + _EXIT_PATIENCE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all ranks. Safe to call twice."""
        self.is_closed = True
        for process in self._processes:
            process.kill()  # nothing happens to one that has been waited for
        for process in self._processes:
            process.wait(_EXIT_PATIENCE_S)
        for end in self._ends:
            end.close()

    def __enter__(self) -> PlainRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.is_closed:
            return
        if kind is None:
            self.close()
        else:
            self.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(end: Connection, timeout_s: float) -> None:
    """Be a rank: take calls until told to leave."""
    import torch.distributed as dist

    if "MESHWRIGHT_TRANSPORT" in os.environ:  # ours, which may come from another checkout
        import meshwright as mw

        mw.join_world()
    elif int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    with contextlib.suppress(EOFError):  # the parent is gone
        while (call := end.recv()) is not None:
            function, arguments = call
            try:
                end.send((True, function(*arguments)))
            except Exception:
                end.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    if sys.platform == "linux":  # a stopped rank would not see that the pipe has ended
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "examples"))
    serve(Connection(int(sys.argv[1])), float(sys.argv[2]))


if __name__ == "__main__":
    main()
