"""Events of ranks that `launch` or `meshwright train` has started, called in this process, whose templates stay."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.events import HANG_S, is_hang, limit_s
from benchmarks.faults.jobs import fatal_lines, harm_job, num_steps, write_config
from tests.faults import leaks
from tests.faults.jobs import endless
from tests.faults.killer import is_rank

from meshwright import cli
from meshwright.errors import exit_code_of
from meshwright.ranks.launch import launch
from meshwright.train.failures import guilty_rank, one_line

OUTER_LIMIT_S = 60.0


class Harmer(threading.Thread):
    """Waits until a run trains, then does an event; ends what is still there long after."""

    def __init__(self, event: dict[str, Any], folder: Path, watch: leaks.Watch) -> None:
        super().__init__(daemon=True)
        self._event, self._folder, self._watch = event, folder, watch
        self._is_over = threading.Event()
        self.began_at: float | None = None
        self.trouble = ""

    def run(self) -> None:
        try:
            self._harm()
        except Exception as error:  # the row says it
            self.trouble = f"{type(error).__name__}: {error}"
        if not self._is_over.wait(OUTER_LIMIT_S):
            self.trouble = f"still there {OUTER_LIMIT_S} s later"
            for pid in self._watch.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def _harm(self) -> None:
        kind, event = self._event["kind"], self._event
        if kind == "no descriptors":  # from the start on
            return
        if kind == "birth SIGKILL":
            pid = self._await(lambda: self._pid_of(event["rank"]))
        else:
            self._await(self._is_warm)
            pid = None
        self._is_over.wait(event["delay_s"])
        if self._is_over.is_set():
            return
        pids = {rank: self._pid_of(rank) for rank in {event["rank"], event["second"]}} if pid is None else {}
        self.began_at = time.monotonic()
        if kind == "birth SIGKILL":
            os.kill(pid, signal.SIGKILL)
        elif kind == "two SIGKILL":
            for each in pids.values():
                os.kill(each, signal.SIGKILL)
        elif kind == "pulse":
            os.kill(pids[event["rank"]], signal.SIGSTOP)
            self._is_over.wait(1.0)
            os.kill(pids[event["rank"]], signal.SIGCONT)
            self.began_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind.startswith("launcher "):
            self._signal_launcher(*kind.removeprefix("launcher ").split())
        elif kind == "full disk":
            with contextlib.suppress(OSError), (self._folder / "runs" / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
        else:
            harm_job(kind, event["rank"], self._folder, pids)

    def _signal_launcher(self, name: str, again: str = "") -> None:
        os.kill(os.getpid(), signal.Signals[name])
        if again:
            self._is_over.wait(0.01)
            os.kill(os.getpid(), signal.Signals[name])

    def _is_warm(self) -> bool:
        return (self._folder / "warm").exists() or num_steps(self._folder) >= endless.WARM_STEPS

    def _pid_of(self, rank: int) -> int:
        is_it = is_rank(rank, self._event["ranks"])
        return next((pid for pid, command in self._watch.processes().items() if is_it(command.strip())), 0)

    def _await(self, look: Any) -> Any:
        until = time.monotonic() + OUTER_LIMIT_S
        while not (found := look()):
            if time.monotonic() > until or self._is_over.wait(0.005):
                raise RuntimeError("the run did not come so far")
        return found


def run_in_process(event: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one event of "launch" or "command" to its end; return what came of it."""
    watch = leaks.Watch()
    os.environ[leaks.MARK_VARIABLE] = watch.mark
    os.environ["MESHWRIGHT_TRANSPORT"] = event["transport"]
    harmer = Harmer(event, folder, watch)
    with _surroundings(event["kind"], folder):
        harmer.start()
        row = _launch(event, folder) if event["entry"] == "launch" else _command(event, folder)
        ended_at = time.monotonic()
        harmer.end()
    if harmer.began_at is not None:
        row["seconds"] = round(ended_at - _begin(harmer.began_at, folder, event["rank"]), 4)
        if is_hang(event["kind"]):
            row["seconds_beyond_limit"] = round(row["seconds"] - HANG_S, 4)
    if harmer.trouble:
        row["trouble"] = harmer.trouble
    row["left"] = _left(watch)
    return row


def _begin(asked_at: float, folder: Path, rank: int) -> float:
    """Return when the harm began: when it was asked for, or when the rank has read what it does."""
    with contextlib.suppress(FileNotFoundError):
        return asked_at + max(0.0, (folder / f"done-{rank}").stat().st_ctime - _wall_of(asked_at))
    return asked_at


def _wall_of(monotonic: float) -> float:
    return time.time() - (time.monotonic() - monotonic)


def _launch(event: dict[str, Any], folder: Path) -> dict[str, Any]:
    is_plain = not (event["plan"].startswith("dp=") and "," not in event["plan"])
    try:
        steps = launch(
            *(endless.train, event["ranks"], event["plan"], str(folder), is_plain), timeout_s=limit_s(event["kind"])
        )
    except BaseException as error:
        rank = guilty_rank(error)
        return {
            "code": exit_code_of(error),
            "named": [] if rank is None else [rank],
            "type": type(error).__name__,
            "cause": one_line(error)[:300],
        }
    return {"code": 75 if len(set(steps)) == 1 else 1, "named": [], "steps": steps}


def _command(event: dict[str, Any], folder: Path) -> dict[str, Any]:
    write_config(folder, event["plan"], limit_s(event["kind"]))
    before, arguments = os.getcwd(), sys.argv
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    said = os.open(folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    code: Any = 0
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(folder)
        sys.argv = ["meshwright", "train", "c.toml"]
        cli.main()
    except SystemExit as leave:
        code = leave.code or 0
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, was in enumerate(kept, start=1):
            os.dup2(was, number)
            os.close(was)
        os.close(said)
        os.chdir(before)
        sys.argv = arguments
    text = (folder / "output").read_text(errors="replace")
    lines = fatal_lines(text)
    row = {"code": code, "named": [int(line["rank"]) if line["rank"].isdigit() else line["rank"] for line in lines]}
    return row | {"cause": lines[-1]["cause"] if lines else text.strip()[-200:], "traceback": "Traceback" in text}


@contextlib.contextmanager
def _surroundings(kind: str, folder: Path) -> Iterator[None]:
    """Give a run the disk or the limits that its event needs."""
    if kind == "full disk":
        (folder / "runs").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder / "runs"], check=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if kind == "no descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if kind == "full disk":
            subprocess.run(["umount", folder / "runs"], check=True)


def _left(watch: leaks.Watch) -> dict[str, Any]:
    """Return what is left two seconds after the end."""
    found: dict[str, Any] = {}
    try:
        watch.assert_nothing_left()
    except AssertionError as left:
        found["watch"] = str(left)[:500]
        for pid in watch.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if shared := [name for name in os.listdir("/dev/shm") if "meshwright" in name]:
        found["shared memory"] = shared
    return found
