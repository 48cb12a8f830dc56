"""A rank ends with the process that has started it under torchrun's variables, and only then."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

import pytest

from meshwright.ranks.agent import follow_agent

LIMIT_S = 20.0


def end_of_a_rank(rank: Callable[[int], None]) -> bytes:
    """Fork an agent, which forks a rank and is killed; return what the rank has written by its end."""
    reading, writing = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.close(reading)
        if os.fork() == 0:
            try:
                rank(writing)
            finally:
                os._exit(0)
        signal.pause()
    os.close(writing)
    text = b""
    deadline = time.monotonic() + LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 100)
        if not part:  # every holder of the other end is gone
            break
        text += part
        if part == b"watching;":
            os.kill(agent, signal.SIGKILL)
    else:
        pytest.fail("the rank lived on")
    os.close(reading)
    os.waitpid(agent, 0)
    return text


def unwritable(kind: str) -> TextIO | None:
    """A standard error as a rank may have it whose agent is gone."""
    if kind == "none":
        return None
    reading, writing = os.pipe()
    if kind == "broken":
        os.close(reading)
    else:  # full, and nobody reads
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writing, True)
    return os.fdopen(writing, "w", buffering=1)


def stay(writing: int, variables: dict[str, str], *, heeds: bool, errors: str = "none") -> None:
    def stop(number: int, _frame: object) -> None:
        os.write(writing, f"signal {number};".encode())
        if heeds:
            os._exit(0)

    os.close(2)
    sys.stderr = unwritable(errors)
    signal.signal(signal.SIGTERM, stop)
    for _ in range(2):  # the second is of no use, and asks for nothing more
        follow_agent(variables, look_s=0.01, patience_s=0.05)
    os.write(writing, b"watching;")
    threading.Event().wait(LIMIT_S if variables else 0.3)  # many times as long as two looks
    os.write(writing, b"stayed;")


@pytest.mark.parametrize("heeds", [True, False])
def test_a_rank_stops_when_its_agent_was_killed(heeds: bool) -> None:
    found = end_of_a_rank(lambda writing: stay(writing, {"TORCHELASTIC_RUN_ID": "none"}, heeds=heeds))
    assert found == b"watching;signal 15;"


@pytest.mark.parametrize("errors", ["broken", "full"])
def test_a_rank_stops_though_nobody_reads_its_errors(errors: str) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "none"}
    found = end_of_a_rank(lambda writing: stay(writing, variables, heeds=False, errors=errors))
    assert found == b"watching;signal 15;"


def test_without_an_agent_a_rank_stays() -> None:
    assert end_of_a_rank(lambda writing: stay(writing, {}, heeds=True)) == b"watching;stayed;"
