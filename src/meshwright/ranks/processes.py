"""Processes of a run: a rank's start, its end observed without reaping it, and the reaper's start."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
from typing import IO, Any

from meshwright.ranks import reaper
from meshwright.ranks.allocator import HUGE_PAGES
from meshwright.ranks.channel import ParentEnd, pack

__all__: list[str] = []

# Variables of other launchers, which libraries would read although our ranks are not those launchers'.
_FOREIGN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def scratch_file(size_bytes: int = 0) -> int:
    """Return the descriptor of a nameless file, which ends with its last descriptor."""
    descriptor = -1
    if hasattr(os, "memfd_create"):
        try:
            descriptor = os.memfd_create("meshwright", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):  # of a container's seccomp profile
                raise
    if descriptor < 0:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    if size_bytes:
        os.truncate(descriptor, size_bytes)
    return descriptor


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of an interpreter that calls `main()` of one of our modules.

    Its import path is this process's own from the first import on. `python -m` would put the current directory first, whose
    `numpy.py` would then run although the user's own interpreter never looks there.

    Args:
        module: The module's dotted name.
        *arguments: Its arguments.
    """
    code = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; from {module} import main; main()"
    return [sys.executable, "-P", "-c", code, *arguments]


def rank_environment(run_id: str, threads: int | None, extra: dict[str, str] | None) -> dict[str, str]:
    """Return the environment of a rank: this process's, without other launchers' variables, plus ours and the caller's.

    Args:
        run_id: The run's id, which every process of the run carries.
        threads: Threads per rank [count]; None keeps the environment's setting.
        extra: The caller's variables, which take precedence.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    # Loopback only: gloo would otherwise listen on the address to which the host's name resolves.
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    if not any(name.startswith("MALLOC_") for name in environment):
        for name, value in HUGE_PAGES.items():
            environment.setdefault(name, value)
    # Else a loop over a set of texts has another order in each process, and stages of a pipeline wait for other layers.
    environment.setdefault("PYTHONHASHSEED", "0")
    environment.update(extra or {})
    environment[reaper.RUN_ID_VARIABLE] = run_id
    return environment


class RankProcess:
    """One rank as its launching process sees it, started by `execute` or by a template's fork (spawning.py).

    Args:
        rank: Its number.
        start: Its first message, see `worker.py`.
    """

    def __init__(self, rank: int, start: dict[str, Any]) -> None:
        ours, self._theirs = socket.socketpair()
        self.rank = rank
        self.label = f"{rank}/{start['world_size']}"  # for people who look at `ps`
        self.stack_file = scratch_file()
        self.channel = ParentEnd(ours)
        self.pid = 0
        self.pidfd: int | None = None
        self.reported_ending: tuple[int | None, int | None] | None = None
        """How it ended, as its parent tells where that is a template."""
        self.is_reaped = False
        self.is_ready = False
        self.is_accounted = False
        """Whether it has answered, failed or died: nothing more is expected of it."""
        self.has_died = False
        self._process: subprocess.Popen[bytes] | None = None
        self.channel.send(pack(("start", {**start, "rank": rank, "stack_file": self.stack_file})))

    @property
    def is_born(self) -> bool:
        """Whether it has a process id."""
        return self.pid > 0

    def execute(self, environment: dict[str, str], descriptors: tuple[int, ...]) -> None:
        """Start the rank as an interpreter of its own.

        Args:
            environment: Its environment variables.
            descriptors: Descriptors that it inherits beside its channel and its stack file.
        """
        theirs = self._theirs.fileno()
        self._process = subprocess.Popen(
            python_command("meshwright.ranks.worker", str(theirs), self.label),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs, self.stack_file, *descriptors),
            start_new_session=True,
        )
        self.let_go()
        self.pid = self._process.pid
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)

    def descriptors_to_hand_over(self) -> tuple[int, int]:
        """Return its end of the channel and its stack file."""
        return self._theirs.fileno(), self.stack_file

    def let_go(self) -> None:
        """Close the rank's end of the channel here, so that the channel ends with the rank."""
        self._theirs.close()

    def ending(self) -> tuple[int | None, int | None] | None:
        """Return (signal, None) or (None, status) once it has ended, None before.

        It is observed, not reaped: until `reap` no other process gets its id, so no kill can hit a stranger.
        """
        if self._process is None:
            return self.reported_ending
        try:
            if not hasattr(os, "waitid"):
                code = self._process.poll()
                return None if code is None else (-code, None) if code < 0 else (None, code)
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code in this process has reaped it
            return (None, None)
        if info is None:
            return None
        return (None, info.si_status) if info.si_code == os.CLD_EXITED else (info.si_status, None)

    def state_letter(self) -> str:
        """Return the kernel's state letter: R running, S sleeping, D waiting for a device, T stopped; "" unknown."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
        return ""

    def stack_size(self) -> int:
        """Return the size of the rank's stack file [bytes]."""
        return os.fstat(self.stack_file).st_size

    def read_stack(self) -> str:
        """Return what the rank has written into its stack file since the last call."""
        text = b""
        while part := os.pread(self.stack_file, 1 << 16, len(text)):
            text += part
        os.truncate(self.stack_file, 0)
        return text.decode(errors="replace").strip("\0\n")

    def reap(self, patience_s: float) -> bool:
        """Wait for the rank's end and reap it. False if it does not end in time."""
        try:
            if self._process is not None:
                self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close this process's descriptors for the rank."""
        self.let_go()
        self.channel.close()
        os.close(self.stack_file)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Reaper:
    """The process that ends the run when the launching process dies. See reaper.py.

    Args:
        run_id: The run's id.
        directory: A directory that it removes then, or None.
    """

    def __init__(self, run_id: str, directory: str | None) -> None:
        command = [sys.executable, "-I", "-S", reaper.__file__, run_id]
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            command + ([directory] if directory else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def _stdin(self) -> IO[str] | None:
        return None if self._process is None else self._process.stdin

    def tell(self, word: str) -> None:
        """Send it a line: the process id of a new rank."""
        stdin = self._stdin()
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.write(word + "\n")
                stdin.flush()

    def dismiss(self) -> None:
        """Dismiss it and wait until it has ended."""
        if self._process is None:
            return
        self.tell(reaper.FAREWELL)
        stdin = self._stdin()
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
