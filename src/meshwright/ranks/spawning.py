"""Spawning of ranks: forked from one process that has imported torch, or each as an interpreter of its own.

Importing torch takes a second or more of CPU time, which N ranks on few cores pay one after another. On Linux one process, the
template (`fork_server.py`), imports it for all. It lives for one launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from meshwright.host import usable_cores
from meshwright.ranks.fork_server import PACKET_BYTES
from meshwright.ranks.processes import RankProcess, python_command

__all__: list[str] = []

# Modules that ranks need before their first call; no user module, which may start threads.
_MODULES = ("torch", "meshwright.ranks.join", "meshwright.ranks.watchdog")
# Drivers of accelerators: forking a process that has loaded one's libraries is safe until it is initialised, they say, and has
# not been tried here.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel")
# Variables that are read once, at a process's start or a library's import: a template must have the ranks' values.
_READ_ONCE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GLIBC_", "MALLOC_", "LD_", "PYTHON", "TORCH_", "PYTORCH_")
_PATIENCE_S = 1.0
_SEND_PATIENCE_S = 10.0


class TemplateProcess:
    """The template, as the launching process sees it.

    Args:
        environment: Its environment variables, which are those of the ranks.
        modules: Modules that it imports beyond those that every rank needs.
    """

    def __init__(self, environment: dict[str, str], modules: tuple[str, ...] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The kernel's parent-death signal follows the thread that started the child, not the process.
        follows_thread = threading.current_thread() is threading.main_thread()
        self._owner = os.getpid()
        self._environment = environment
        self._socket = ours
        self._ranks: dict[int, RankProcess] = {}
        self.is_ready = False
        self.refusal: str | None = None
        """Why no rank can be forked from it."""
        self.is_lost = False
        """Whether it has ended by itself after it was ready."""
        self.failure: int | None = None
        """The error number of a fork that failed."""
        try:
            self._process = subprocess.Popen(
                python_command(
                    "meshwright.ranks.fork_server",
                    *(str(theirs.fileno()), str(os.getpid()), str(int(follows_thread))),
                    *_MODULES,
                    *modules,
                ),
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is a report, for a selector."""
        return self._socket.fileno()

    def serves(self, environment: dict[str, str]) -> bool:
        """Tell whether ranks with this environment can be forked from it."""

        def read_once(variables: dict[str, str]) -> dict[str, str]:
            return {name: value for name, value in variables.items() if name.startswith(_READ_ONCE)}

        return os.getpid() == self._owner and read_once(environment) == read_once(self._environment)

    def fork(self, rank: RankProcess, environment: dict[str, str], descriptors: list[int]) -> None:
        """Request a rank; its birth is reported later.

        Args:
            rank: The rank, not yet born.
            environment: Its environment variables.
            descriptors: The board's and the store's.
        """
        token = id(rank)  # the table keeps it alive until it is reaped
        self._ranks[token] = rank
        request = {
            "fork": token,
            "label": rank.label,
            "environment": None if environment is self._environment else environment,
        }
        self._send(request, [*rank.descriptors_to_hand_over(), *descriptors])
        rank.let_go()

    def release(self, rank: RankProcess) -> None:
        """Allow a rank to be reaped once it has ended: its process id is no longer used."""
        self._send({"release": id(rank)}, [])

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if self._socket.fileno() < 0:
            return  # the interpreter ends, and has dismissed the template before its ranks
        # The template may have been stopped or killed, which `hear` reports.
        self._socket.settimeout(_SEND_PATIENCE_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Handle the template's reports; wait this long for the first one [s]. Returns whether there was any."""
        heard = False
        while not self.is_lost and self.refusal is None:
            self._socket.settimeout(0.0 if heard else timeout_s)
            try:
                packet = self._socket.recv(PACKET_BYTES)
            except (BlockingIOError, TimeoutError):
                return heard
            except OSError:
                packet = b""
            heard = True
            if packet:
                self._take(json.loads(packet))
            elif self.is_ready:
                self.is_lost = True
                for rank in self._ranks.values():
                    rank.reported_ending = rank.reported_ending or (signal.SIGKILL, None)  # the kernel's, see worker.py
            else:
                self.refusal = "it ended before it was ready"
        return heard

    def _take(self, report: dict[str, Any]) -> None:
        if "ready" in report:
            self.is_ready = True
        elif "refused" in report:
            self.refusal = report["refused"]
        elif "born" in report:
            self._ranks[report["born"]].pid = report["pid"]
        elif "ended" in report:
            self._ranks[report["ended"]].reported_ending = (report["signal"], report["status"])
        elif "reaped" in report:
            self._ranks.pop(report["reaped"]).is_reaped = True
        else:
            self.failure = report["errno"]

    def how_it_ended(self) -> str:
        """Return how it ended, once it has."""
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "closed its files"
        return f"left with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def dismiss(self) -> None:
        """Dismiss it and wait until it has ended, with all remaining ranks."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which also ends copies that a child of this process holds
        self._socket.close()
        try:
            # During its imports it does not listen, and it has no ranks yet.
            self._process.wait(_PATIENCE_S if self.is_ready else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


kept: list[TemplateProcess] = []
"""Templates that outlive a launch and serve any number of them, in turns among a launch's ranks. A test suite's, which starts
hundreds of groups; empty otherwise."""


class Spawner:
    """The start of one group's ranks.

    Args:
        ranks: The ranks, none of them born.
        environment: Their environment variables.
        descriptors: Descriptors that they inherit: the board's and the store's.
        on_birth: Called for each rank as soon as it has a process id.
    """

    def __init__(
        self,
        ranks: list[RankProcess],
        environment: dict[str, str],
        descriptors: list[int],
        on_birth: Callable[[RankProcess], None],
    ) -> None:
        self._ranks = ranks
        self._environment = environment
        self._descriptors = descriptors
        self._on_birth = on_birth
        self._selector: selectors.BaseSelector | None = None
        self._told: set[int] = set()
        self._is_begun = False
        self._owned: TemplateProcess | None = None
        self._templates = [each for each in kept if each.is_ready and not each.is_lost and each.serves(environment)]
        if not self._templates and len(ranks) > 1 and can_fork():
            # What an optimizer imports when it is made takes about as long again. Ranks that have a core each do that side by
            # side, if they make one.
            self._owned = TemplateProcess(environment, ("torch._dynamo",) if len(ranks) > usable_cores() else ())
            self._templates = [self._owned]

    @property
    def pids(self) -> set[int]:
        """The process ids of this group's template, if there is one."""
        return set() if self._owned is None else {self._owned.pid}

    @property
    def lost(self) -> TemplateProcess | None:
        """The template that ranks were forked from, if it has ended; its ranks are killed with it."""
        return next((each for each in self._templates if each.is_lost), None)

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Start the ranks, now or when the template is ready; the selector calls `hear` for its reports."""
        self._selector = selector
        for template in self._templates:
            selector.register(template, selectors.EVENT_READ, self.hear)
        self._advance()

    def hear(self) -> None:
        """Handle the templates' reports.

        Raises:
            OSError: A rank could not be forked.
        """
        for template in self._templates:
            template.hear()
            if template.failure is not None:
                number, template.failure = template.failure, None
                raise OSError(number, f"a rank could not be forked: {os.strerror(number)}")
        if self.lost is not None or any(each.refusal is not None for each in self._templates):
            self._stop_listening()
        self._advance()

    def _stop_listening(self) -> None:
        for template in self._templates:
            if self._selector is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(template)

    def _advance(self) -> None:
        if not self._is_begun and all(each.is_ready or each.refusal is not None for each in self._templates):
            self._is_begun = True
            if self._owned is not None and self._owned.refusal is not None:
                self._owned.dismiss()
                self._owned, self._templates = None, []
            for rank in self._ranks:
                if self._templates:
                    template = self._templates[rank.rank % len(self._templates)]
                    template.fork(rank, self._environment, self._descriptors)
                else:
                    rank.execute(self._environment, tuple(self._descriptors))
                    self._tell(rank)
        for rank in self._ranks:
            if rank.is_born:
                self._tell(rank)

    def _tell(self, rank: RankProcess) -> None:
        if rank.rank not in self._told:
            self._told.add(rank.rank)
            self._on_birth(rank)

    def end(self) -> None:
        """Reap the ranks, which are dead or dying, and dismiss this group's template."""
        self._stop_listening()
        for rank in self._ranks:
            if not self._templates:
                rank.reap(_PATIENCE_S)
        if self._owned is not None:
            self._owned.dismiss()
            return
        for template in self._templates:
            mine = [rank for rank in self._ranks if self._templates[rank.rank % len(self._templates)] is template]
            for rank in mine:
                template.release(rank)
            while not all(rank.is_reaped for rank in mine) and template.hear(_PATIENCE_S):
                pass


def can_fork() -> bool:
    """Tell whether ranks are forked on this system: on Linux, without an accelerator."""
    return (
        sys.platform == "linux"
        and hasattr(os, "pidfd_open")
        and hasattr(os, "waitid")
        and not any(os.path.exists(driver) for driver in _DRIVERS)
    )
