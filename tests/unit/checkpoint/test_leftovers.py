"""What lies beside checkpoints when a run begins, clocks that jump, and disks that are slower than the saves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint.store import Store
from meshwright.run.checkpoints import saving
from unit.checkpoint.made import save_tensors

DRAFTS = 1000


def save(root: Path, step: int) -> Path:
    return save_tensors(root, {"w": torch.full((4, 2), float(step))}, step=step)


def test_a_thousand_drafts_and_a_half_deleted_checkpoint_go_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for number in range(DRAFTS):
        draft = tmp_path / f".draft-00000002-{number:016x}"
        draft.mkdir()
        (draft / "rank-00000.safetensors").write_bytes(b"half")
    half = save(tmp_path, 3)
    half.rename(tmp_path / f".deleted-{half.name}-0a1b2c3d")
    (tmp_path / f".deleted-{half.name}-0a1b2c3d" / "manifest.json").unlink()
    (tmp_path / "notes.txt").write_text("the user's")
    snapshot, skipped = Store(tmp_path).newest()
    snapshot.close()
    assert (snapshot.manifest.step, skipped) == (1, [])
    assert Store(tmp_path).clear_leftovers() == DRAFTS + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000001"]


def test_a_draft_that_cannot_be_removed_hides_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    (tmp_path / ".draft-00000002-00").mkdir()

    def refused(*_args: Any, **_more: Any) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refused)
        Store(tmp_path).clear_leftovers()
        save(tmp_path, 2)
    assert [saved.step for saved in Store(tmp_path).saved()] == [2, 1]
    Store(tmp_path).clear_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("jump_s", [-86_400.0, -3_600.0, 3_600.0])
def test_no_clock_decides_which_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    now = time.time
    save(tmp_path, 1)
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    save(tmp_path, 2)
    for path in tmp_path.rglob("*"):  # the older one's files are of tomorrow, the newer one's of long ago
        of = now() + 86_400 if "step-00000001" in str(path) else 0.0
        os.utime(path, (of, of))
    store = Store(tmp_path)
    with store.newest()[0] as snapshot:
        assert snapshot.manifest.step == 2
    assert [path.name for path in store.retain(1)] == ["step-00000001"]


def loss_fn(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def test_a_disk_slower_than_the_saves_has_one_writer_and_holds_no_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_again, synced, writers = threading.Event(), os.fsync, set[int]()
    between: list[tuple[list[int], int]] = []  # the first save over, the second not begun: steps, writers

    def slow_sync(file: int) -> None:
        """Take until the next save is asked for, as a disk that is slower than the interval does."""
        writers.add(threading.get_ident())
        assert asked_again.wait(60)
        synced(file)

    def finish(model: Any) -> None:
        asked_again.set()
        finished(model)
        between.append(([saved.step for saved in Store(tmp_path).saved()], len(writers)))

    finished = saving.finish
    model = mw.apply_plan(
        lambda: nn.Linear(3, 2), "single", loss_fn=loss_fn, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    batch = (torch.ones(4, 3), torch.zeros(4, 2))
    model.step(batch)
    monkeypatch.setattr(os, "fsync", slow_sync)
    mw.save_checkpoint(model, tmp_path, step=1, in_background=True)
    at_the_save = {name: value.clone() for name, value in model.full_state_dict().items()}
    for _ in range(3):
        model.step(batch)
    assert Store(tmp_path).saved() == []  # the disk is not done, and three steps are
    monkeypatch.setattr(saving, "finish", finish)
    mw.save_checkpoint(model, tmp_path, step=4, in_background=True)
    assert between[0] == ([1], 1)
    mw.wait_for_checkpoint(model)
    assert [saved.step for saved in Store(tmp_path).saved()] == [4, 1]
    assert mw.load_checkpoint(model, tmp_path, step=1) == 1
    assert all(torch.equal(value, at_the_save[name]) for name, value in model.full_state_dict().items())
