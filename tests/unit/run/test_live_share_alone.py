"""The share of a save in the background by itself: what is written is what was there when training let it go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint.blocks import Digesting
from meshwright.run.checkpoints import live_share
from meshwright.run.checkpoints.live_share import LiveShare, ShareMemory

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def tensors_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_share, "LEAST_BYTES", 1)
    monkeypatch.setattr(live_share, "PIECE_BYTES", 64)


def tensors() -> list[tuple[str, Tensor]]:
    return [("a", torch.randn(50)), ("b", torch.randn(4, 30).t()), ("c", torch.tensor(3.0)), ("d", torch.randn(7, 9))]


def share_of(named: list[tuple[str, Tensor]], mode: Any = "read") -> LiveShare:
    memory = ShareMemory()
    memory.mode = mode
    return LiveShare(named, frozenset({"a", "b", "d"}), memory, 5)


def written(pieces: Iterator[Any]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


@pytest.mark.parametrize("mode", ["watch", "read", "copy"])
@pytest.mark.parametrize("count", range(0, 12, 2))
def test_what_is_written_after_it_was_let_go_is_what_was_there(mode: str, count: int) -> None:
    named = tensors()
    expected = written(iter(share_of(named, "copy").file))
    share = share_of(named, mode)
    pieces = iter(share.file)
    begin = [bytes(piece) for piece in itertools.islice(pieces, count)]

    def train() -> None:
        share.let_go()
        for _, tensor in named:
            tensor.zero_()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(WAIT_S)  # however slow the disk is on which the last piece is being written
    assert not thread.is_alive()
    assert b"".join(begin) + written(pieces) == expected


def test_a_write_that_is_undone_while_its_piece_is_written_is_found() -> None:
    # The file had the piece as written by the script, and the digest what was there before and after: a save without an error
    # was damaged when it was loaded.
    share, (_, tensor) = share_of(named := tensors()), named[0]
    before = tensor.clone()
    tensor.add_(1)
    contents = Digesting(share.file)
    for place, _ in enumerate(contents):  # each is in the file here, and digested when the next is asked for
        if place == 1:
            tensor.copy_(before)
    with pytest.raises(mw.CheckpointError, match="step 5 is not saved"):
        share.check(contents.table())


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_write_between_two_pieces_is_found(number: int) -> None:
    share, (_, tensor) = share_of(named := tensors()), named[0]
    contents = Digesting(share.file)
    for place, _ in enumerate(contents):
        if place == number:
            tensor.view(-1)[49] += 1  # which the last of its four pieces has
    with pytest.raises(mw.CheckpointError, match="step 5 is not saved"):
        share.check(contents.table())


def test_where_steps_are_shorter_than_the_writing_later_saves_copy_at_once() -> None:
    for count, mode in ((0, "copy"), (100, "read")):
        memory, named = ShareMemory(), [("a", torch.randn(200))]
        memory.mode = "read"
        share = LiveShare(named, frozenset({"a"}), memory, 5)
        list(itertools.islice(share.file, count))
        share.let_go()
        assert memory.mode == mode


def test_a_writer_that_fails_holds_no_step_up() -> None:
    share = share_of(tensors())
    pieces = iter(share.file)
    list(itertools.islice(pieces, 3))  # in the middle of a piece
    share.end()
    share.let_go()
    assert share.waited_s < WAIT_S


def test_a_copy_without_room_is_an_error_of_the_save_and_not_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    share = share_of(tensors())
    monkeypatch.setattr(ShareMemory, "place", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    share.let_go()
    with pytest.raises(mw.StorageError, match="of step 5 in the host's memory: no room"):
        written(iter(share.file))


def test_memory_is_kept_for_the_next_save() -> None:
    memory, named = ShareMemory(), tensors()
    LiveShare(named, frozenset(), memory, 1)
    places = [memory.place(name, tensor).data_ptr() for name, tensor in named]
    LiveShare(named, frozenset(), memory, 2)
    assert [memory.place(name, tensor).data_ptr() for name, tensor in named] == places
