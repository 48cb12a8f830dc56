"""Start a launching process, read its lines, with a deadline on everything."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 100.0  # far beyond what a quiet machine needs, below the time that a test has


class Command:
    """A process that prints JSON lines."""

    def __init__(self, arguments: list[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._rest = b""
        self._deadline = time.monotonic() + DEADLINE_S

    def read_until(self, is_wanted: Callable[[dict[str, Any]], bool], count: int = 1) -> list[dict[str, Any]]:
        """Return the first lines that are wanted."""
        while len(found := [line for line in self.lines if is_wanted(line)]) < count:
            assert self._read_more(), f"it ended after {self.lines}: {self.errors()}"
        return found[:count]

    def finish(self) -> int:
        """Read to the end and return the exit code."""
        while self._read_more():
            pass
        code = self.process.wait(max(0.1, self._deadline - time.monotonic()))
        self.close()
        return code

    def _read_more(self) -> bool:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, self._deadline - time.monotonic()))
        assert ready, f"nothing more within {DEADLINE_S} s after {self.lines}"
        part = os.read(self.process.stdout.fileno(), 1 << 16)
        *whole, self._rest = (self._rest + part).split(b"\n")
        self.lines += [json.loads(line) for line in whole if line]
        return bool(part)

    def errors(self) -> str:
        if self.process.stderr is None or self.process.stderr.closed:
            return ""
        self.process.kill()
        return self.process.stderr.read().decode(errors="replace")[-3000:]

    def close(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.close()


def launching(job: str, num: int = 2, *args: Any, **options: Any) -> Command:
    """Start a launching process for a job."""
    request = {"job": job, "num": num, "args": list(args), "options": options}
    return Command(["-m", "tests.faults.launcher", json.dumps(request)])
