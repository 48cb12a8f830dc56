"""The process that ranks are forked from; arguments of `main`: DESCRIPTOR PARENT FOLLOWS_THREAD MODULE...

It imports torch once, and forks ranks on request. It computes nothing, has one thread, and imports none of the user's modules.
Each rank leads a session, learns its place over its own channel, and runs `worker.be_rank` like a process of its own. The
template reports each rank's end at once, and reaps it only when the launching process no longer needs its id.

Requests, one packet each: {"fork": TOKEN, "label": ..., "environment": ... or null} with four descriptors (the rank's channel,
its stack file, the board, the store), {"release": TOKEN}. Reports: {"ready": true} or {"refused": REASON}, once;
{"born": TOKEN, "pid": ...} or {"failed": TOKEN, "errno": ...}, {"ended": TOKEN, "signal": ..., "status": ...},
{"reaped": TOKEN}. The end of the stream, or of the launching process, ends the template and all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from typing import Any, NoReturn

from meshwright.garbage import freeze_all
from meshwright.ranks import worker
from meshwright.ranks.channel import RankEnd
from meshwright.ranks.signals import STOP_SIGNALS

__all__: list[str] = []

PACKET_BYTES = 1 << 20
_NUM_DESCRIPTORS = 4
# Fields of /proc/self/stat, counted from the third: addresses of a process's command line and environment.
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)


class Template:
    """The forking process. See the module's docstring.

    Args:
        control: Its end of the socket pair.
        signal_mask: The launching process's blocked signals, for the ranks.
        child_handler: The launching process's handler of SIGCHLD, for the ranks.
    """

    def __init__(self, control: socket.socket, signal_mask: set[Any], child_handler: Any) -> None:
        self._control = control
        self._signal_mask = signal_mask
        self._child_handler = child_handler
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}
        self._files: dict[int, int] = {}
        """The process descriptor of each rank that has not ended, by token."""
        self._released: set[int] = set()

    def run(self) -> None:
        """Fork and report, until the launching process closes its end."""
        self._selector.register(self._control, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._report_end(key.data)
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, _NUM_DESCRIPTORS)
        if not packet:
            return False
        request = json.loads(packet)
        if "release" in request:
            self._released.add(request["release"])
            self._reap_released()
            return True
        self._fork(request, descriptors)
        return True

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        token, own_pid = request["fork"], os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._say(failed=token, errno=error.errno)
        if pid == 0:
            self._be_rank(request, descriptors, own_pid)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            return
        self._pids[token] = pid
        self._files[token] = os.pidfd_open(pid)
        self._selector.register(self._files[token], selectors.EVENT_READ, token)
        self._say(born=token, pid=pid)

    def _be_rank(self, request: dict[str, Any], descriptors: list[int], parent_pid: int) -> NoReturn:
        """Run, in the child, as `worker.main` in a process of its own."""
        try:
            os.setsid()
            signal.signal(signal.SIGCHLD, self._child_handler)
            self._selector.close()
            self._control.close()
            for file in self._files.values():
                os.close(file)
            channel, stack_file, board, store = descriptors
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            sys.argv = [worker.__file__, str(channel), request["label"]]
            line = [sys.executable, "-m", "meshwright.ranks.worker", *sys.argv[1:]]
            _show(_ARGUMENTS, [part.encode(errors="surrogateescape") for part in line])
            if request["environment"] is not None:
                _take_environment(request["environment"])
            _draw_own_numbers()
            worker.be_rank(
                RankEnd(socket.socket(fileno=channel)),
                {
                    "stack_file": stack_file,
                    "board": board,
                    "store": f"/proc/self/fd/{store}",
                    "parent_pid": parent_pid,
                    "die_with_thread": True,  # the template has no other
                    "signal_mask": self._signal_mask,
                },
            )
        except BaseException:  # noqa: BLE001 - as an interpreter that ends with a traceback
            traceback.print_exc()
            os._exit(1)
        finally:
            os._exit(0)

    def _report_end(self, token: int) -> None:
        file = self._files.pop(token)
        self._selector.unregister(file)
        os.close(file)
        info = os.waitid(os.P_PID, self._pids[token], os.WEXITED | os.WNOWAIT)
        number = 0 if info is None else info.si_status
        exited = info is not None and info.si_code == os.CLD_EXITED
        self._say(ended=token, signal=None if exited else number, status=number if exited else None)
        self._reap_released()

    def _reap_released(self) -> None:
        for token in [each for each in self._released if each not in self._files]:
            self._released.discard(token)
            if token in self._pids:
                os.waitpid(self._pids.pop(token), 0)
            self._say(reaped=token)

    def end(self) -> None:
        """Kill and reap all remaining ranks."""
        for token, pid in self._pids.items():
            if token in self._files:
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _say(self, **report: Any) -> None:
        say(self._control, report)


def say(control: socket.socket, report: dict[str, Any]) -> None:
    """Send a report; nothing happens if the launching process is gone."""
    with contextlib.suppress(OSError):
        control.send(json.dumps(report).encode())


def _show(fields: tuple[int, int], parts: list[bytes]) -> None:
    """Make `ps` and /proc show this command line and environment instead of the template's, as far as they fit.

    The kernel reads both from the memory in which it placed them at the start. Tools that look for a rank's number or a run's id
    read them there. If the process cannot write this memory, they keep showing the template's.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open("/proc/self/stat", "rb") as file:
            numbers = file.read().rsplit(b")", 1)[1].split()
        first, last = (int(numbers[field]) for field in fields)
        text = b""
        for part in parts:
            if len(text) + len(part) + 1 <= last - first:
                text += part + b"\0"
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(first)
            memory.write(text.ljust(last - first, b"\0"))


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    ours_first = sorted(environment, key=lambda name: not name.startswith("MESHWRIGHT_"))
    _show(_ENVIRONMENT, [os.fsencode(f"{name}={environment[name]}") for name in ours_first])


def _draw_own_numbers() -> None:
    """Seed numpy's global generator from fresh entropy, as in a process of its own; `random` does so itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def load(modules: list[str]) -> str:
    """Import the modules that ranks need; return why ranks cannot be forked from here, or ""."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a rank of its own runs into it, too, and knows how to tell
        return f"the import failed: {error!r}"
    if sys.modules["torch"].cuda.is_initialized():
        return "the import has initialised CUDA, which no forked process can use"
    if _num_threads() > 1:
        # OpenBLAS (numpy's) starts its threads when it is imported, ends them before a fork and starts them anew when
        # they are needed, on either side. Others do not.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if (count := _num_threads()) > 1:
        return f"the import has left {count - 1} threads, which a forked process has not"
    # Objects of now live on; a collector that skips them keeps their pages shared among the ranks.
    freeze_all()
    return ""


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    """Run a template."""
    # Stop signals are for ranks: a batch system that signals every process of a job must not end all ranks through this one.
    # Blocked, not ignored: a rank begins with them blocked, too, and so misses none until its handlers are there.
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Ignored, which is handed on, it would leave nothing of a child to wait for.
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor, parent_pid, follows_thread, *modules = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    worker.die_with_parent(int(parent_pid), die_with_thread=follows_thread == "1")
    refusal = load(modules)
    if refusal:
        say(control, {"refused": refusal})
        os._exit(0)
    template = Template(control, signal_mask, child_handler)
    say(control, {"ready": True})
    try:
        template.run()
        template.end()
    finally:
        os._exit(0)
