"""Ranks that are joined by torch.distributed alone, without a launching process; and what /proc says about them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.command import DEADLINE_S, ROOT

_SLEEPING = "S"
_STOPPED = "T"
# How long to wait before looking again at what gives no notice, as the state of a process in /proc.
_LOOK_S = 0.002


class Ranks:
    """One group's ranks, and what they have said so far."""

    def __init__(self, zygote: Zygote, number: int, size: int, place: Path) -> None:
        self._zygote, self._number, self.size, self.place = zygote, number, size, place
        self.lines: list[dict[str, Any]] = []

    def said(self, rank: int, key: str) -> list[Any]:
        """What a rank has said under this key, up to now."""
        return [line[key] for line in self.lines if line["rank"] == rank and key in line]

    def hear(self, rank: int, key: str, count: int = 1) -> Any:
        """Wait until a rank has said this, and return it."""
        while len(found := self.said(rank, key)) < count:
            assert key == "exit" or not self.said(rank, "exit"), f"rank {rank} ended: {self.lines}\n{self.errors(rank)}"
            self._zygote.read(f"waiting for {key!r} of rank {rank}; so far: {self.lines}\n{self.errors(rank)}")
        return found[count - 1]

    def hear_all(self, key: str, ranks: list[int] | None = None) -> list[Any]:
        return [self.hear(rank, key) for rank in (range(self.size) if ranks is None else ranks)]

    def pid(self, rank: int) -> int:
        return self.hear(rank, "born")

    def errors(self, rank: int) -> str:
        path = self.place / f"errors-{rank}"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def signal(self, rank: int, number: int) -> float:
        """Send a signal; return when [s, monotonic]."""
        at = time.monotonic()
        os.kill(self.pid(rank), number)
        return at

    def await_sleep(self, ranks: list[int]) -> None:
        """Wait until every thread of these ranks sleeps in the kernel: whoever said that it goes in is in."""
        for rank in ranks:
            self._await_states(rank, _SLEEPING)

    def stop(self, rank: int) -> None:
        """Stop a rank as a debugger or a scheduler would, and wait until it stands."""
        self.signal(rank, signal.SIGSTOP)
        self._await_states(rank, _STOPPED)

    def await_half_way(self, rank: int) -> None:
        """Wait until a rank with a `HalfMapping` stands in the middle of it."""
        self.hear(rank, "half")
        file = os.open(self.place / "reached", os.O_RDONLY | os.O_NONBLOCK)
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            reached = selector.select(DEADLINE_S)
        os.close(file)
        assert reached, f"not within {DEADLINE_S} s: rank {rank} is half way; {self.lines}"

    def complete(self, rank: int) -> None:
        """Let it go on: give it the second half, full of zeros."""
        os.truncate(self.hear(rank, "half"), self.hear(rank, "bytes"))

    def await_naps(self, rank: int, count: int) -> None:
        """Wait until a rank has gone to sleep this many times more."""
        pid = self.pid(rank)
        before = num_naps(pid)
        self._await(lambda: num_naps(pid) >= before + count, f"rank {rank} naps")

    def _await_states(self, rank: int, state: str) -> None:
        pid = self.pid(rank)
        self._await(lambda: set(thread_states(pid)) == {state}, f"the threads of rank {rank} are in state {state}")

    @staticmethod
    def _await(is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
            threading.Event().wait(_LOOK_S)

    def end(self) -> None:
        """Kill who is left and wait for all."""
        for rank in range(self.size):
            if not self.said(rank, "exit"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid(rank), signal.SIGKILL)
        self.hear_all("exit")


class Zygote:
    """The process that forks ranks, and the pipe on which all of them speak."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.shm_zygote"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._groups: dict[int, Ranks] = {}
        self._numbers = itertools.count()
        self._rest = b""

    @contextlib.contextmanager
    def ranks(
        self,
        job: str,
        size: int,
        *,
        timeout_s: float = 30.0,
        finalizes: bool = False,
        env: dict[str, str] | None = None,
        imports: Sequence[str] = (),
        **args: Any,
    ) -> Iterator[Ranks]:
        """Start ranks on a job; they are gone when the block ends. The zygote imports `imports` for them.

        With `finalizes`, a rank that has done its job takes down its interpreter, rather than end on the spot.
        """
        assert self.process.stdin is not None
        number = next(self._numbers)
        # Not below a directory of pytest's, which is closed to other users: one test has ranks of two.
        place = Path(tempfile.mkdtemp(prefix="shm-ranks-"))
        place.chmod(0o777)
        (place / "store").touch()
        (place / "store").chmod(0o666)
        ranks = self._groups[number] = Ranks(self, number, size, place)
        request = {"group": number, "size": size, "job": job, "args": args, "place": str(place)}
        request |= {"timeout_s": timeout_s, "finalizes": finalizes, "env": env or {}, "imports": list(imports)}
        lines = [json.dumps({**request, "rank": rank}) + "\n" for rank in range(size)]
        try:
            self.process.stdin.write("".join(lines).encode())
            self.process.stdin.flush()
            yield ranks
        finally:
            ranks.end()
            del self._groups[number]
            shutil.rmtree(place)

    def read(self, what_for: str) -> None:
        """Take in what ranks have said; wait for something."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(DEADLINE_S)
        assert ready, f"nothing more within {DEADLINE_S} s, {what_for}"
        part = os.read(self.process.stdout.fileno(), 1 << 16)
        assert part, f"the zygote ended, {what_for}"
        *whole, self._rest = (self._rest + part).split(b"\n")
        for line in map(json.loads, whole):
            self._groups[line["group"]].lines.append(line)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait(DEADLINE_S)


def thread_states(pid: int) -> list[str]:
    """The kernel's letter for each thread of a process."""
    states = []
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            states.append((path / "stat").read_text().rpartition(") ")[2][0])
    return states


def num_naps(pid: int) -> int:
    """How often the threads of a process have gone to sleep of their own accord."""
    count = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        fields = (path / "status").read_text().splitlines()
        count += sum(int(line.split()[1]) for line in fields if line.startswith("voluntary_ctxt_switches"))
    return count


def segments(pids: list[int]) -> set[int]:
    """The inodes of our segments that these processes have mapped."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:meshwright" in line:
                found.add(int(line.split()[4]))
    return found


def holders(segment: int) -> dict[int, str]:
    """Who on this machine holds a segment, and by what."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if segment in segments([pid]):
                found[pid] = "mapping"
            for path in Path(f"/proc/{pid}/fd").iterdir():
                if "memfd:meshwright" in str(path.readlink()) and path.stat().st_ino == segment:
                    found[pid] = "file"
    return found
