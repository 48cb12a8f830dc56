"""A save in the background by itself: several ranks' threads in one process, in the orders that delays bring about."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.checkpoint.store import SaveUnderWay, Store
from meshwright.run.checkpoints import background
from meshwright.run.checkpoints.background import BackgroundSave

WAIT_S = 60.0


def begin(draft: SaveUnderWay, rank: int, num_ranks: int, write: Callable[[], Any], committed: Any = None) -> Any:
    """Return one rank's part of a save."""
    commit = [].append if committed is None else committed.append
    place = (rank, num_ranks)
    return BackgroundSave(draft, share=None, write=write, commit=commit, place=place, has_given_up=lambda: False)


def fail() -> None:
    raise mw.StorageError("the disk of one rank is full")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_is_removed_when_no_rank_writes_any_more(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The directory went away below a rank that was still writing: that one told of a missing directory, before the cause, or
    # made a file there again, which stayed.
    draft, is_gone, discard = Store(tmp_path).begin(5), threading.Event(), SaveUnderWay.discard

    def note_discard(self: SaveUnderWay) -> None:
        discard(self)
        is_gone.set()

    monkeypatch.setattr(SaveUnderWay, "discard", note_discard)

    def write_late() -> list[str]:
        assert not is_gone.wait(0.2)
        (draft.path / "rank-00002.safetensors").write_bytes(b"all of it")
        return ["row"]

    ranks = [begin(draft, rank, 3, fail if rank == failing else list) for rank in range(2)]
    ranks.append(begin(draft, 2, 3, write_late))
    ranks[2].wait_for_file()
    ranks[0].wait(WAIT_S)
    with pytest.raises(mw.StorageError, match="the disk of one rank is full"):
        ranks[0].wait_for_end()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_model_waits_from_then_on_for_another_ranks_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time before the close counted: a save that took longer than the limit was given up at once.
    draft, committed, clock = Store(tmp_path).begin(5), list[Any](), [0.0]
    is_waiting, is_closed, wait = threading.Event(), threading.Event(), BackgroundSave.wait

    def sleep(_: float) -> None:
        is_waiting.set()
        assert is_closed.wait(WAIT_S)
        if clock[0] > 9.5 * background._AT_EXIT_S:
            draft.leave_note(1, [None, "row"])
        clock[0] += background._AT_EXIT_S / 4

    def wait_from_now_on(self: BackgroundSave, timeout_s: float | None = None) -> None:
        is_closed.set()
        wait(self, timeout_s)

    monkeypatch.setattr(background.time, "sleep", sleep)
    monkeypatch.setattr(background.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(BackgroundSave, "wait", wait_from_now_on)
    saving = begin(draft, 0, 2, list, committed)
    assert is_waiting.wait(WAIT_S)
    clock[0] = 9.4 * background._AT_EXIT_S  # the other rank's disk is slow
    saving.close()
    assert committed == [[[], "row"]]
