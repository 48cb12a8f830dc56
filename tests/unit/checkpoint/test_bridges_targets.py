"""Bridges' targets: whole or not there, never over what exists; and options and kinds that do not fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import durable
from meshwright.checkpoint.bridges import drafts, own_format
from meshwright.checkpoint.bridges.converting import convert
from meshwright.checkpoint.bridges.kinds import kind_of_source
from meshwright.errors import CheckpointError, ConfigError, StorageError
from unit.checkpoint.made import save_tensors


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    save_tensors(tmp_path / "own", {"model/a": torch.ones(4, 4), "model/b": torch.ones(3)})
    convert(tmp_path / "own", tmp_path / "in.safetensors")
    return {"own": tmp_path / "own", "file": tmp_path / "in.safetensors"}


TARGETS = [("own", "out.safetensors"), ("own", "hf"), ("file", "steps"), ("file", "step-00000005")]


@pytest.mark.parametrize(("source", "name"), TARGETS)
def test_what_exists_is_not_written_over(tmp_path: Path, sources: dict[str, Path], source: str, name: str) -> None:
    target = tmp_path / name
    for make in (lambda: target.write_text("mine"), target.mkdir, lambda: target.symlink_to("nowhere")):
        make()
        with pytest.raises(ConfigError, match="exists"):
            convert(sources[source], target)
        if target.is_dir():
            target.rmdir()
        else:
            assert target.is_symlink() or target.read_text() == "mine"
            target.unlink()


def _file_operations(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, stop_at: int) -> int:
    """Do work that loses its disk at the n-th operation; return how many there were."""
    count = 0
    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "rename", "link"):
            original = getattr(os, name)

            def operation(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == stop_at:
                    raise OSError(28, "No space left on device")
                return _original(*args, **kwargs)

            patch.setattr(durable.os, name, operation)
        work()
    return count


@pytest.mark.parametrize(("source", "name"), TARGETS)
def test_a_disk_that_fails_at_any_operation_leaves_nothing_half(
    tmp_path: Path, sources: dict[str, Path], source: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "there"
    place.mkdir()
    total = _file_operations(lambda: convert(sources[source], place / name), monkeypatch, 0)
    assert total >= 4
    shutil.rmtree(place)
    place.mkdir()
    for number in range(1, total + 1):
        with pytest.raises(StorageError):
            _file_operations(lambda: convert(sources[source], place / name), monkeypatch, number)
        if (place / name).exists():  # the name was given, its durability failed
            assert number == total
        else:
            assert list(place.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with pytest.raises(ConfigError, match="exists"), drafts.draft_of(target) as draft:  # noqa: PT012 - the end raises
        draft.write_text("ours")
        target.write_text("theirs")
    assert target.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_links_gets_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(drafts.os, "link", no_links)
    with drafts.draft_of(tmp_path / "a") as draft:
        draft.write_text("ours")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_source_that_gives_less_than_it_says_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: Any, name: str) -> Iterator[torch.Tensor]:
        yield self._snapshot.read(f"model/{name}")[:1]

    save_tensors(tmp_path / "own", {"model/a": torch.ones(4, 4)})
    monkeypatch.setattr(own_format.CheckpointWeights, "pieces", short)
    with pytest.raises(CheckpointError, match="'a' ended 48 bytes before"):
        convert(tmp_path / "own", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


# -- options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        ("own", "copy", {"target_kind": "meshwright"}, "would be a copy"),
        ("own", "a.safetensors", {"config": Path("x")}, "--config goes with a Hugging Face"),
        ("file", "b", {"copies_of_tied": True}, "goes with files of others"),
        ("file", "hf", {"target_kind": "hf", "step": 3}, "none is read or written"),
        ("file", "step-00000005", {"step": 3}, "differ"),
        ("file", "step-5", {}, "no name of a new step"),
        ("file", "step-00000005.2", {}, "no name of a new step"),
        ("file", "step-000000005", {}, "no name of a new step"),
        ("file", "b", {"prefix": "x"}, "--prefix goes with sources of kind dcp"),
        ("own", "hf", {"max_shard_size": "much"}, "not a valid size"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, sources: dict[str, Path], source: str, target: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(sources[source], tmp_path / target, **options)
    assert not (tmp_path / target).exists()


def test_kinds_are_recognised_and_what_is_none_is_refused(tmp_path: Path, sources: dict[str, Path]) -> None:
    assert kind_of_source(sources["own"]) == kind_of_source(sources["own"] / "step-00000001") == "meshwright"
    assert kind_of_source(sources["file"]) == "safetensors"
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no file of weights that is known"):
        kind_of_source(tmp_path / "model.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights of a kind"):
        kind_of_source(tmp_path / "empty")
    (sources["own"] / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="could be meshwright and hf"):
        kind_of_source(sources["own"])
    with pytest.raises(StorageError, match="No such file"):
        kind_of_source(tmp_path / "nothing")
