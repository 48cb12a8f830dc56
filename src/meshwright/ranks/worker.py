"""Program of a launched rank: `main` with the arguments DESCRIPTOR RANK/RANKS, or a fork by `fork_server.py`.

The main thread runs the user's calls. One thread reads the channel, another watches the main thread. Incoming messages are
("start", ...), ("call", payload, main, stop), ("stop",), ("exit",). Outgoing ones are ("ready",), ("result", value),
("error", ...), ("event", ...), ("stop", signal or None).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, UserCodeError
from meshwright.ranks import unfinished
from meshwright.ranks.agent import end_without_teardown
from meshwright.ranks.channel import RankEnd
from meshwright.ranks.error_transfer import describe_error, early_end
from meshwright.ranks.heartbeat import Board, Pulse
from meshwright.ranks.link import RankLink
from meshwright.ranks.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from meshwright.ranks.world import World

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, die_with_thread: bool) -> None:
    """Make the kernel kill this process when its parent ends; exit at once if the parent is already gone."""
    if sys.platform == "linux" and die_with_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class Rank:
    """One rank's life: join, serve calls, leave."""

    def __init__(self, channel: RankEnd, start: dict[str, Any]) -> None:
        self._channel = channel
        self._start = start
        self._calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._board = Board(start["board"], start["world_size"])
        self._pulse = Pulse(self._board, start["rank"])
        self._link = RankLink(channel, self._pulse)
        self._pid = os.getpid()

    def prepare(self) -> None:
        """Install what must precede any failure: signal handlers, stack dumps, the watching threads."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)  # ranks share them: whole lines at a time
        for number in STOP_SIGNALS:
            signal.signal(number, self._link.note_signal)
        if "signal_mask" in self._start:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._start["signal_mask"])
        os.register_at_fork(after_in_child=self._become_stranger)
        faulthandler.enable(all_threads=False)
        # The main thread by itself, since a dump of all ends after a hundred, and the newest come first.
        own, everyone = self._start["stack_signal"], self._start["stack_signal"] + 1
        faulthandler.register(own, file=self._start["stack_file"], all_threads=False)
        faulthandler.register(everyone, file=self._start["stack_file"], all_threads=True)
        if self._start["folder"] is not None:  # what ranks are forked from may have been started in another one
            os.chdir(self._start["folder"])
        sys.path[:] = self._start["sys_path"]
        sys.argv[:] = self._start["sys_argv"]  # a script may read its arguments at module level, also in the ranks
        threading.Thread(target=self._listen, name="meshwright-channel", daemon=True).start()

    def _become_stranger(self) -> None:
        """Detach a forked child (a DataLoader's) from the rank's channel and record, and restore default signals."""
        self._channel.muted = True
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _listen(self) -> None:
        """Handle messages until the channel ends, which it does with the launching process."""
        while (message := self._channel.receive()) is not None:
            if message[0] == "stop":
                self._link.stop = True
            else:
                self._calls.put(message)
        os.killpg(os.getpgid(self._pid), signal.SIGKILL)

    def join(self) -> World:
        """Find the other ranks."""
        self._pulse.progress(-1, "import")
        from meshwright.ranks import join, watchdog
        from meshwright.ranks.world import set_current_world

        self._pulse.progress(-1, "join")
        world = join.join_launched(self._start, self._link)
        world.default_group.on_enter = self._pulse.enter
        world.default_group.on_exit = self._pulse.leave
        set_current_world(world)
        watchdog.start(self._channel, self._link, self._board, self._pulse, world.rank)
        return world

    def serve(self) -> None:
        """Run calls until told to exit."""
        while True:
            self._link.is_busy.clear()
            message = self._calls.get()
            self._link.is_busy.set()
            if message[0] == "exit":
                return
            _, payload, main, stop = message
            self._link.stop = self._link.stop or stop
            self._pulse.progress(-1, "run")
            self.attempt(lambda payload=payload, main=main: self._call(payload, main))
            self._pulse.progress(-1, "idle")

    def attempt(self, work: Any) -> bool:
        """Run a function; its exception goes to the launching process. Returns whether it succeeded."""
        try:
            work()
        except (SystemExit, KeyboardInterrupt) as error:
            # Who leaves on purpose has the time: all ranks are ended as soon as this is told.
            unfinished.await_all(unfinished.LEAVE_S if isinstance(error, SystemExit) else 0.0)
            self._channel.send(("error", describe_error(unfinished.noted(self._as_user_error(error)), shown=error)))
        except BaseException as error:  # noqa: BLE001 - everything that a call can raise must be told
            self._channel.send(("error", describe_error(unfinished.noted(error))))
        else:
            return True
        return False

    def _call(self, payload: bytes, main: str | None) -> None:
        function, args = self._unpack(payload, main)
        result = function(*args)
        try:
            packed = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - pickling runs the result's own code
            raise UserCodeError(
                f"rank {self._start['rank']} returned a {type(result).__qualname__} that cannot be sent back: {error}",
                rank=self._start["rank"],
                fix="return plain data (numbers, text, lists, dicts, CPU tensors) from the function",
            ) from None  # its text is enough; its traceback is only ours
        self._channel.send(("result", packed))

    def _unpack(self, payload: bytes, main: str | None) -> tuple[Any, Any]:
        if main is not None:
            kind, _, name = main.partition(":")
            # What multiprocessing does for its own children: the script is run under another name, and known as
            # `__main__` afterwards, so that its main guard holds and pickles of its classes work both ways.
            multiprocessing.spawn.prepare({"init_main_from_name" if kind == "module" else "init_main_from_path": name})
        try:
            return pickle.loads(payload)  # noqa: S301 - from the launching process, over the private channel
        except (AttributeError, ImportError) as error:
            raise ConfigError(
                f"rank {self._start['rank']} cannot import what it is to call: {error}",
                fix="use a function at the top level of a module that `import` finds from here",
            ) from error

    def _as_user_error(self, error: BaseException) -> BaseException:
        return early_end(error, self._start["rank"], self._start["world_size"])


def be_rank(channel: RankEnd, own: dict[str, Any]) -> None:
    """Run as a rank.

    Args:
        channel: Its end of the channel; the first message describes the rank's place.
        own: Entries that replace those of that message in this process.
    """
    message = channel.receive()
    if message is None:
        return
    start = {**message[1], **own}
    die_with_parent(start["parent_pid"], die_with_thread=start["die_with_thread"])
    rank = Rank(channel, start)
    rank.prepare()
    if rank.attempt(rank.join):
        channel.send(("ready",))
        rank.serve()
        end_without_teardown(0)
    else:
        threading.Event().wait()  # until the launching process, which has the report, kills this one


def main() -> None:
    """Run as a rank that is an interpreter of its own."""
    be_rank(RankEnd(socket.socket(fileno=int(sys.argv[1]))), {})
