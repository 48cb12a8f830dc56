"""Disks that are full or fail: the error has path and cause, the old checkpoint stays, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.test_store import assert_holds, save

from meshwright.checkpoint import durable
from meshwright.checkpoint.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.store import Store
from meshwright.errors import StorageError

_OF_A_SAVE = ("open", "write", "fsync", "close", "rename", "mkdir", "stat", "scandir")
_OF_A_READER = ("open", "fstat", "preadv")


@contextlib.contextmanager
def failing(number: int, code: int, operations: Sequence[str]) -> Iterator[list[str]]:
    """Let the n-th of these functions of `os` fail; give the list that then holds its name."""
    failed: list[str] = []
    left = [number]

    def around(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                failed.append(name)
                if name == "close":
                    operation(*args)  # Linux closes it, and tells of the error
                raise OSError(code, os.strerror(code))
            return operation(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in operations:
            patch.setattr(os, name, around(name, getattr(os, name)))
        yield failed


@contextlib.contextmanager
def told(code: int, path: Path) -> Iterator[list[StorageError]]:
    """Catch an error that has the system's words for its cause and the path, into the list given; no other."""
    caught: list[StorageError] = []
    try:
        yield caught
    except StorageError as error:
        if os.strerror(code) not in error.message or str(path) not in error.message:
            raise
        caught.append(error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ESTALE])
def test_whichever_operation_fails_the_old_one_stays_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # slow, and it is made to fail below
    store = Store(tmp_path / "store")
    save(store, 1)
    number = 0
    for number in range(100):
        with failing(number, code, _OF_A_SAVE) as failed, told(code, tmp_path) as errors:
            save(store, 2 + number)
        assert len(errors) == len(failed), failed  # none is passed over
        if not failed:
            break
        with store.newest()[0] as snapshot:
            assert_holds(snapshot, snapshot.manifest.step)
            assert snapshot.manifest.step in (1, 2 + number)
        assert store.saved()[-1].step == 1
        shutil.rmtree(tmp_path / "store" / f"step-{2 + number:08d}", ignore_errors=True)
        store.clear_leftovers()
        assert [path.name for path in (tmp_path / "store").iterdir()] == ["step-00000001"]
    assert number > 20


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_whichever_operation_fails_a_reader_is_told_with_the_path(tmp_path: Path, code: int) -> None:
    path, number = save(Store(tmp_path), 1), 0
    for number in range(100):
        with (
            failing(number, code, _OF_A_READER) as failed,
            told(code, path) as errors,
            OpenCheckpoint(path) as snapshot,
        ):
            snapshot.check()
            snapshot.read("model/weight")
        assert len(errors) == len(failed), failed
        if not failed:
            break
    assert number > 10


@pytest.mark.parametrize(
    ("code", "fix"),
    [(errno.EROFS, "mount that file system for writing"), (errno.EACCES, "permission to make"), (errno.EIO, None)],
)
def test_what_is_not_the_disks_own_has_a_fix(code: int, fix: str | None, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught, durable.told_of(tmp_path / "run", "make"):
        raise OSError(code, os.strerror(code))
    assert caught.value.fix is None if fix is None else fix in str(caught.value.fix)


def test_a_folder_under_a_file_is_refused_and_another_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StorageError, match="take another folder"):
            save(Store(taken), 1)
    store = Store(tmp_path / "run")
    save(store, 1)
    with store.newest()[0] as snapshot:
        assert_holds(snapshot, 1)


def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit in (0, 1, 100, 700):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(StorageError, match=r"File too large.* bytes are free"):
                save(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with store.newest()[0] as snapshot:
        assert_holds(snapshot, 1)
    store.clear_leftovers()
    save(store, 2)


def test_a_full_disk_is_told_with_path_and_bytes_and_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    save(store, 1)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "write", full)
        with pytest.raises(
            StorageError, match=r"rank-00000.*, [0-9]+ bytes: No space left on device; [0-9]+ bytes are free"
        ):
            save(store, 2)
    assert [saved.step for saved in store.saved()] == [1]
    assert store.clear_leftovers() == 1
    save(store, 2)
    assert [saved.step for saved in store.saved()] == [2, 1]


def test_a_sync_that_fails_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fails_once(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable.os, "fsync", fails_once)
    with pytest.raises(StorageError, match="Input/output error"):
        save(Store(tmp_path), 1)
    assert len(calls) == 2  # not tried again
    assert not Store(tmp_path).saved()


def test_a_file_system_without_inodes_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    left = os.statvfs_result([*found[:6], 0, 0, *found[8:]])
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "statvfs", lambda _: left)
        with pytest.raises(StorageError, match=r"[1-9][0-9]* bytes are free; no file more \(inode\) is free"):
            raise_no_space(tmp_path / "file")


def raise_no_space(path: Path) -> None:
    with durable.told_of(path, "write"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
