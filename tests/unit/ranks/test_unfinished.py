"""Work in a rank's threads: what is under way is waited for, or named; what is over is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.ranks import unfinished


class Save:
    """A save that is over after it was looked at some times."""

    def __init__(self, number: int, looks: int) -> None:
        self.text = f"the save of step {number}"
        self.looks = looks

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unfinished, "_works", [])
    return


def test_an_error_names_what_is_under_way_alone() -> None:
    unfinished.begin(Save(1, 1))
    unfinished.begin(Save(2, 9))
    unfinished.begin(Save(3, 9))
    error = unfinished.noted(ValueError("broken"))
    assert error.__notes__ == [f"the save of step {number} was under way, and may be lost" for number in (2, 3)]


def test_whoever_waits_goes_on_when_all_is_over_and_after_the_limit() -> None:
    unfinished.begin(Save(1, 3))
    assert unfinished.await_all(20.0) == []
    endless = Save(2, 1 << 30)
    unfinished.begin(endless)
    assert unfinished.await_all(0.05) == [endless]
