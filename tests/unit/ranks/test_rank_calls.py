"""ranks/calls.py: what a rank learns of another's error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from meshwright.errors import ApplyError, CorruptionError, LostPeerError, MeshwrightError, NonFiniteError, rank_of
from meshwright.ranks.calls import Calls


class Store:
    """torch's store, as far as calls use it."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        if self.held.get(key, "") == expected:
            self.held[key] = desired
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def wait(self, keys: list[str], _: Any) -> None:
        if not self.check(keys):
            raise RuntimeError("timed out")

    def get(self, key: str) -> bytes:
        return self.held[key].encode()


def _told(error: Exception) -> MeshwrightError:
    """Return what rank 1 is told of an error that rank 0 has raised in a step."""
    store: Any = Store()
    with pytest.raises(type(error)), Calls(0, store).during("step"):
        raise error
    calls = Calls(1, store)
    with calls.during("step"):
        told = calls.others_error()
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (NonFiniteError("NaN", rank=2, micro_batch=3, parameter="head.weight", fix="lower it"), 2),
        (CorruptionError("a bit", rank=1, step=7, part="loss"), 1),
        (ApplyError("it cannot be cut", step=4, phase="step"), 0),
    ],
)
def test_another_ranks_error_keeps_what_it_holds_beside_its_text(error: MeshwrightError, rank: int) -> None:
    told = _told(error)
    assert type(told) is type(error)
    assert told.message == f"rank 0 cannot go on: {error.message}"
    own = {name: value for name, value in vars(error).items() if name not in ("message", "rank")}
    assert {name: vars(told)[name] for name in own} == own
    assert rank_of(told) == rank


def test_an_error_of_the_users_own_names_its_rank() -> None:
    assert rank_of(_told(KeyError("x"))) == 0


def test_ranks_that_wait_in_the_call_that_another_has_left_learn_who_is_missing() -> None:
    store: Any = Store()
    calls = Calls(0, store)
    with pytest.raises(LostPeerError), calls.during("step"), calls.during("evaluate"):
        raise LostPeerError("a peer is gone", rank=0)
    waiting = Calls(1, store)
    with waiting.during("step"), waiting.during("evaluate"):
        assert waiting.others_error() is None  # that one is lost tells nobody why
        calls.tell_missing(2, "rank 2 gives no sign of life")
        told = waiting.others_error()
    assert isinstance(told, LostPeerError)
    assert (told.rank, told.peer) == (0, 2)
    assert "rank 2 gives no sign of life" in told.message


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("step", "evaluate"), "rank 0 in model.step; rank 1 in model.evaluate (model 2)"),
        (("save", ""), "rank 0 in save_checkpoint; rank 1 in no call of all ranks"),
        (("step", "step"), ""),
    ],
)
def test_ranks_that_do_not_agree_about_an_exchange_name_their_calls(kinds: tuple[str, str], words: str) -> None:
    store: Any = Store()
    own, other = Calls(0, store), Calls(1, store)
    with contextlib.ExitStack() as entered:
        for calls, kind in zip((own, other), kinds, strict=True):
            if kind:
                entered.enter_context(calls.during(kind, 2 if kind == "evaluate" else 1))
        assert other.stand([0, 1]) is None  # rank 0 has not answered yet
        told = own.stand([0, 1])
    assert (told is None) is (not words)
    if told is not None:
        assert told.message == f"ranks are in different calls: {words}"


def test_a_rank_that_does_not_answer_is_not_named() -> None:
    store: Any = Store()
    calls = Calls(0, store)
    with calls.during("step"):
        assert calls.stand([0, 1]) is None


def test_ranks_that_part_in_one_call_are_told_what_decides_their_way() -> None:
    store: Any = Store()
    own, other = Calls(0, store), Calls(1, store)
    cause = ValueError("rank 0 is in all_reduce of 8 bytes, rank 1 in all_gather of 4 bytes")
    assert own.apart([0, 1], cause) is None  # in no call
    with own.during("step"), other.during("step"):
        other.stand([0, 1])
        told = own.apart([0, 1], cause)
    assert told is not None
    assert told.message == f"ranks have gone different ways in model.step: {cause}"
    assert "hooks" in (told.fix or "")


def test_a_rank_that_left_a_call_alone_is_named_by_the_calls_number() -> None:
    store: Any = Store()
    own, other = Calls(0, store), Calls(1, store)
    with contextlib.suppress(ValueError), other.during("step", 1):
        raise ValueError("of the user's loss")
    with own.during("step", 1), other.during("step", 1):
        assert other.stand([0, 1]) is None
        told = own.stand([0, 1])
    assert told is not None
    assert (
        told.message == "ranks are in different calls: rank 0 in model.step, number 1; rank 1 in model.step, number 2"
    )
    assert "catches alone" in (told.fix or "")
