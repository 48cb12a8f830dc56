"""Who is guilty, and what the error says."""

from __future__ import annotations

import pickle
import random
import signal
import sys
from pathlib import Path

import pytest

from meshwright.errors import LostPeerError, UserCodeError
from meshwright.ranks.blame import Sign, death_error, guilty, summarise
from meshwright.ranks.error_transfer import describe_error, rebuild_error
from meshwright.ranks.heartbeat import Beat
from meshwright.train.failures import one_line


def beat(**changes: object) -> Beat:
    values: dict[str, object] = {
        "step": 3,
        "phase": "forward",
        "progress_at": 0.0,
        "waiting_since": 0.0,
        "collective": "",
        "num_entered": 0,
        "num_left": 0,
        "rss_bytes": 1 << 30,
        "memory_limit_bytes": 0,
        "num_oom_kills": -1,
        "memory_group": "",
    }
    return Beat(**{**values, **changes})  # type: ignore[arg-type]


def test_first_hand_comes_before_second_hand_and_early_before_late() -> None:
    signs = [
        Sign(0, 1.0, secondary=True, error=LostPeerError("connection closed")),
        Sign(1, 3.0, secondary=False, error=ValueError("late")),
        Sign(2, 2.0, secondary=False, error=ValueError("cause")),
        Sign(3, 0.5, secondary=True, error=LostPeerError("connection closed")),
    ]
    for seed in range(10):
        random.Random(seed).shuffle(signs)
        assert guilty(signs).rank == 2
    assert summarise(signs) == "ranks 0, 1, 3 failed after it"
    assert guilty([sign for sign in signs if sign.secondary]).rank == 3
    assert summarise(signs[:1]) == ""


def test_a_killed_rank_is_not_called_out_of_memory_without_a_reason() -> None:
    error = death_error(1, 4, 77, signal_number=signal.SIGKILL, status=None, beat=beat(memory_limit_bytes=4 << 30))
    assert str(error) == "rank 1 of 4 (pid 77) was killed by SIGKILL at step 3, phase forward"


def test_near_its_limit_it_is() -> None:
    near = beat(rss_bytes=int(3.9 * 2**30), memory_limit_bytes=4 << 30)
    error = death_error(1, 4, 77, signal_number=signal.SIGKILL, status=None, beat=near)
    assert "likely out of memory: resident 3.90 GiB of limit 4.00 GiB" in str(error)
    error = death_error(1, 4, 77, signal_number=signal.SIGSEGV, status=None, beat=near)
    assert "memory" not in str(error)


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_where_the_kernels_counter_rose_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    for seen, expected in ((2, True), (3, False), (-1, False)):
        record = beat(num_oom_kills=seen, memory_group=str(tmp_path), memory_limit_bytes=4 << 30)
        error = death_error(0, 1, 77, signal_number=signal.SIGKILL, status=None, beat=record)
        assert ("likely out of memory" in str(error)) == expected


def test_before_the_first_step_only_the_phase_is_named() -> None:
    error = death_error(0, 2, 77, signal_number=None, status=0, beat=beat(step=-1, phase="join"))
    assert "left before its work was done (status 0), at phase join" in str(error)
    assert (error.signal_name, error.exit_status) == (None, 0)


def test_a_lost_peer_is_second_hand_however_it_is_wrapped() -> None:
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert describe_error(lost)["secondary"]


def _wrap_a_lost_peer() -> None:
    try:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    except RuntimeError:
        raise ValueError("training failed") from None


def test_a_lost_peer_that_user_code_hides_is_second_hand() -> None:
    with pytest.raises(ValueError, match="training failed") as caught:
        _wrap_a_lost_peer()
    assert describe_error(caught.value)["secondary"]


def test_an_error_of_our_own_under_a_lost_peer_is_first_hand() -> None:
    try:
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        described = describe_error(error)
    assert not described["secondary"]
    assert described["text"] == "the cause"


class _LosesItsTextError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__("prefix " + text)


class _RefusesToPickleError(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise pickle.PicklingError("no")


def test_what_survives_the_way_is_itself() -> None:
    error = rebuild_error(describe_error(KeyError("x")), 1, 2)
    assert type(error) is KeyError
    assert error.args == ("x",)


def test_nothing_is_imported_for_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_users_model.py").write_text("class OwnError(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_users_model  # pyright: ignore[reportMissingImports]

    described = describe_error(of_the_users_model.OwnError("no such token\nsecond line"))
    assert type(rebuild_error(described, 1, 2)).__name__ == "OwnError"
    del sys.modules["of_the_users_model"]  # as in a launching process, which has not imported the model
    rebuilt = rebuild_error(described, 1, 2)
    assert "of_the_users_model" not in sys.modules
    assert isinstance(rebuilt, UserCodeError)
    assert one_line(rebuilt) == "OwnError: no such token"


def test_a_text_of_a_class_of_its_own_crosses_as_plain_text() -> None:
    class Text(str):
        __slots__ = ()

    class OddError(Exception):
        def __str__(self) -> str:
            return Text("odd")

    assert type(describe_error(OddError())["text"]) is str


@pytest.mark.parametrize("error", [_LosesItsTextError("x"), _RefusesToPickleError("x")])
def test_what_does_not_is_told(error: Exception) -> None:
    rebuilt = rebuild_error(describe_error(error), 1, 2)
    assert isinstance(rebuilt, UserCodeError)
    assert rebuilt.rank == 1
    assert f"rank 1 of 2 raised {type(error).__qualname__}: {error}" in str(rebuilt)
