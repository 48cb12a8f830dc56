"""Which exceptions are on their way out, and which are being handled."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from meshwright.ranks import unfinished, watchdog
from meshwright.ranks.link import RankLink
from meshwright.ranks.watchdog import _handled_exception, is_in_flight

Probe = Callable[[], None]


def in_finally(probe: Probe) -> None:
    try:
        raise ValueError("x")
    finally:
        probe()


def in_outer_finally(probe: Probe) -> None:
    try:
        try:
            raise ValueError("x")
        except KeyError:
            pass
    finally:
        probe()


def in_with_exit(probe: Probe) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(probe)
        raise ValueError("x")


def in_with_exit_over_lines(probe: Probe) -> None:
    with (
        contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(probe)
        raise ValueError("x")


def raised_below(probe: Probe) -> None:
    try:
        in_finally(lambda: None)
    finally:
        probe()


def in_except(probe: Probe) -> None:
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("x")
        except ValueError:
            probe()


def in_bare_except(probe: Probe) -> None:
    try:
        raise ValueError("x")
    except:  # noqa: E722
        probe()


def in_finally_inside_except(probe: Probe) -> None:
    try:
        raise ValueError("x")
    except ValueError:
        try:
            str(1)
        finally:
            probe()


def in_generator_cleanup(probe: Probe) -> None:
    def numbers() -> Iterator[int]:
        try:
            yield 1
            raise ValueError("x")
        finally:
            probe()

    list(numbers())


def test_a_parser_that_another_thread_disturbs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(_source: str) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=156, after=182)")

    seen: list[bool] = []

    def probe() -> None:
        error = sys.exc_info()[1]
        assert error is not None
        seen.append(is_in_flight(error, sys._getframe()))

    monkeypatch.setattr("meshwright.ranks.watchdog.ast.parse", disturbed)
    with contextlib.suppress(ValueError):
        in_finally(probe)
    assert seen == [False]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (in_finally, True),
        (in_outer_finally, True),
        (in_with_exit, True),
        (in_with_exit_over_lines, True),
        (raised_below, True),
        (in_generator_cleanup, True),
        (in_except, False),
        (in_bare_except, False),
        (in_finally_inside_except, False),
    ],
)
def test_an_exception_on_its_way_out(case: Callable[[Probe], None], expected: bool) -> None:
    seen: list[bool] = []

    def probe() -> None:
        error = sys.exc_info()[1]
        assert error is not None
        seen.append(is_in_flight(error, sys._getframe()))

    with contextlib.suppress(ValueError):
        case(probe)
    assert seen == [expected]


def test_a_thread_without_an_exception() -> None:
    import threading

    assert _handled_exception(threading.get_ident()) is None


def test_without_its_source_nothing_is_claimed() -> None:
    seen: list[bool] = []

    def probe() -> None:
        error = sys.exc_info()[1]
        assert error is not None
        seen.append(is_in_flight(error, sys._getframe()))

    code = compile("try:\n  raise ValueError('x')\nfinally:\n  probe()\n", "<nowhere>", "exec")
    with contextlib.suppress(ValueError):
        exec(code, {"probe": probe})
    assert seen == [False]


_LOOKING = """
import sys, threading, time
from meshwright.ranks.watchdog import _handled_exception

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # hands the interpreter to another thread

def look(thread):
    kept = []
    while True:
        kept.append((len(kept), 0, 0))  # so that tuples of three are allocated, not reused
        Cycle()
        _handled_exception(thread)

threading.Thread(target=look, args=(threading.get_ident(),), daemon=True).start()
end = time.monotonic() + 2.0
while time.monotonic() < end:
    thread = threading.Thread(target=str)
    thread.start()
    thread.join()
print("ended")
"""


def test_looking_never_blocks_threads_that_start_and_end() -> None:
    # In Python 3.11 a collection during sys._current_exceptions() blocks all threads for ever (python/cpython#106883).
    done = subprocess.run([sys.executable, "-c", _LOOKING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "ended"


def test_an_idle_rank_is_looked_at_rarely_and_a_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five looks a second at each of a pool's idle ranks took a twentieth of the machine.
    monkeypatch.setattr(watchdog, "_IDLE_PERIOD_S", 3600.0)
    link, looks = RankLink(Mock(), Mock()), queue.SimpleQueue[float]()
    board = Mock()
    board.read.return_value.num_left = 0
    watched = watchdog._Watchdog(Mock(), link, board, Mock(), 0)
    ended = threading.Event()

    def look(now: float) -> None:
        looks.put(now)
        if ended.is_set():
            raise SystemExit

    def run() -> None:
        with contextlib.suppress(SystemExit):
            watched.run()

    monkeypatch.setattr(watched, "_note_memory", look)
    link.is_busy.clear()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with pytest.raises(queue.Empty):
        looks.get(timeout=2 * watchdog._PERIOD_S)
    link.is_busy.set()
    first, second = looks.get(timeout=30), looks.get(timeout=30)
    assert second > first
    ended.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [SystemExit, ValueError])
@pytest.mark.parametrize("has_save", [True, False])
def test_whoever_leaves_on_purpose_is_not_told_of_while_it_waits_for_a_save(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], has_save: bool
) -> None:
    # Its model closes in a `with`, and waits for the disk; the launching process ends all ranks as soon as it is told.
    raised, save = kind(0), Mock(text="the save of step 3")
    save.is_over.return_value = False
    monkeypatch.setattr(unfinished, "_works", [save] if has_save else [])
    board, channel = Mock(num_ranks=2), Mock()
    board.read.return_value = Mock(num_left=0, is_waiting=True, waiting_since=0.0)
    watched = watchdog._Watchdog(channel, Mock(), board, Mock(), 0)

    def look() -> None:
        watched._main_thread = threading.get_ident()
        watched._look_for_exception(10.0)
        watched._look_for_exception(12.0)

    with contextlib.suppress(SystemExit, ValueError), contextlib.ExitStack() as stack:
        stack.callback(look)
        raise raised
    told = [call.args[0][1] for call in channel.send.call_args_list]
    assert len(told) == (0 if has_save and kind is SystemExit else 1)
    notes = ["the save of step 3 was under way, and may be lost"]
    assert getattr(raised, "__notes__", []) == (notes if told and has_save else [])


def test_a_handled_exception_is_gone_after_its_block() -> None:
    # Its frames hold what the user drops by it: a model that another save then met, or the memory that was too little.
    board = Mock()
    board.read.return_value = Mock(num_left=0, is_waiting=False, waiting_since=0.0)
    watched = watchdog._Watchdog(Mock(), Mock(), board, Mock(), 0)
    watched._main_thread = threading.get_ident()
    held: list[weakref.ref[set[int]]] = []

    def fail() -> None:
        large = {1}
        held.append(weakref.ref(large))
        raise ValueError

    for now in range(2):
        try:
            fail()
        except ValueError:
            watched._look_for_exception(float(now))
            watched._look_for_exception(now + 0.2)
        assert watched._seen_at == now  # one that came after is another one
        assert [ref() for ref in held] == [None] * (now + 1)
